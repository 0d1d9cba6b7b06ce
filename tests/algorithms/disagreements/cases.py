"""What is compared: our function with its keys, the other trainer's, and why they differ where they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tests.algorithms.disagreements import distributions, ours, peers
from tests.algorithms.disagreements.padded_rows import PaddedRows
from tests.algorithms.random_rows import MAX_LENGTH, packed
from torch import Tensor

# As in the table of algorithms; terms that all share come last.
REWARD_MODEL = "(reward model)"
ORDER = [*ours.CONFIGS, REWARD_MODEL, "all"]

Values = Callable[[PaddedRows], Tensor]
Loss = Callable[[PaddedRows, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison. `why` is empty where both are equal."""

    algorithm: str
    part: str
    peer: str
    function: str
    ours: Values
    theirs: Values
    keys: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def entry(self) -> dict[str, str]:
        """The case in words."""
        keys = ", ".join(f"{key}={value}" for key, value in self.keys.items())
        words = {"algorithm": self.algorithm, "part": self.part, "keys": keys}
        return words | {"peer": self.peer, "function": self.function, "why": self.why}

    def difference(self, rows: PaddedRows) -> float:
        """The largest difference of a value, or of a loss and its gradient."""
        return float((self.ours(rows) - self.theirs(rows)).abs().max())


def with_gradient(loss: Loss, at: Callable[[PaddedRows], Tensor]) -> Values:
    """A loss and its gradient as one vector."""

    def values(rows: PaddedRows) -> Tensor:
        at_R = at(rows).requires_grad_()
        value = loss(rows, at_R)
        (gradient_R,) = torch.autograd.grad(value, at_R)
        return torch.cat([value.detach().double()[None], gradient_R.double()])

    return values


def policy(rows: PaddedRows) -> Tensor:
    return packed(rows.rows.policy)


def critic_values(rows: PaddedRows) -> Tensor:
    """The critic's values after an update, apart from those before it."""
    return packed(rows.rows.values) + 0.5 * packed(rows.rows.policy)


def advantages(
    name: str, peer: str, function: str, theirs: Values, why: str = "", lam: float | None = None, **keys: Any
) -> Case:
    of_critic = {} if lam is None else {"lam": lam}
    mine = partial(ours.advantages, name=name, **keys, **of_critic)
    shown = keys if lam is None else {**keys, "critic.lam": lam}
    return Case(name, "advantages", peer, function, mine, theirs, shown, why)


def loss(name: str, peer: str, function: str, theirs: Loss, why: str = "", **keys: Any) -> Case:
    mine = partial(ours.loss, name=name, **keys)
    return Case(name, "loss", peer, function, with_gradient(mine, policy), with_gradient(theirs, policy), keys, why)


def of_verl(name: str, function: str, why: str = "", given: Mapping[str, Any] | None = None, **keys: Any) -> Case:
    theirs = partial(peers.verl_advantages, function=function, **(given or {}))
    return advantages(name, "verl", function, theirs, why, **keys)


def of_openrlhf(name: str, estimator: str, why: str = "", given: Mapping[str, Any] | None = None, **keys: Any) -> Case:
    theirs = partial(peers.openrlhf_advantages, estimator=estimator, **(given or {}))
    function = f"compute_advantages_and_returns, {estimator}"
    return advantages(name, "OpenRLHF", function, theirs, why, **keys)


def by_verl(name: str, mode: str, given: Mapping[str, Any], why: str = "", **keys: Any) -> Case:
    return loss(name, "verl", _call(mode, given), partial(peers.verl_loss, mode=mode, **given), why, **keys)


def by_trl(name: str, given: Mapping[str, Any], why: str = "", **keys: Any) -> Case:
    return loss(name, "TRL", _call("GRPOTrainer", given), partial(peers.trl_loss, **given), why, **keys)


def by_openrlhf(name: str, given: Mapping[str, Any], why: str = "", **keys: Any) -> Case:
    return loss(name, "OpenRLHF", _call("PolicyLoss", given), partial(peers.openrlhf_loss, **given), why, **keys)


def _call(function: str, given: Mapping[str, Any]) -> str:
    flat = {key: value for name, group in given.items() for key, value in _flat(name, group)}
    return ", ".join([function, *(f"{key} {value}" for key, value in flat.items())])


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else [(name, value)]


def alone(advantages_of: Values) -> Values:
    """Of rows each of which is the only response to its prompt."""
    return lambda rows: advantages_of(replace(rows, rows=replace(rows.rows, groups=list(range(len(rows.rows.groups))))))


ONE_RESPONSE = [
    Case(
        name,
        "advantages of a single response",
        "verl",
        f"compute_{name}_outcome_advantage",
        alone(partial(ours.advantages, name=name)),
        alone(partial(peers.verl_advantages, function=f"compute_{name}_outcome_advantage")),
        why="it keeps the reward as it is; ours is 0, as nothing is compared",
    )
    for name in ("grpo", "rloo")
]

ADVANTAGES = [
    of_verl("grpo", "compute_grpo_outcome_advantage", std_epsilon=1e-6),
    of_openrlhf("grpo", "group_norm", std_epsilon=1e-9),
    of_verl("dr_grpo", "compute_grpo_outcome_advantage", given={"norm_adv_by_std_in_grpo": False}),
    of_openrlhf("dr_grpo", "dr_grpo"),
    of_verl("rloo", "compute_rloo_outcome_advantage"),
    of_openrlhf("rloo", "rloo", given={"kl_coef": 0.05}, kl_coef=0.05, kl_in="advantage"),
    of_openrlhf(
        "rloo",
        "rloo",
        "the KL term is subtracted after the baseline, so that it isn't compared with the other responses'",
        given={"kl_coef": 0.05},
        kl_coef=0.05,
    ),
    of_verl(
        "reinforce_pp",
        "compute_reinforce_plus_plus_outcome_advantage",
        given={"kl_coef": 0.05, "config": ours.SimpleGamma(1.0)},
        kl_coef=0.05,
    ),
    of_openrlhf("reinforce_pp", "reinforce", given={"kl_coef": 0.05}, kl_coef=0.05, std="biased"),
    of_verl(
        "reinforce_pp_baseline",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        whiten_over="tokens",
    ),
    of_verl(
        "reinforce_pp_baseline",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "it normalises over tokens, where long responses count for more",
    ),
    of_openrlhf("reinforce_pp_baseline", "reinforce_baseline", whiten_over="tokens", std="biased"),
    advantages(
        "gdpo", "verl", "compute_gdpo_outcome_advantage", peers.verl_gdpo, whiten_over="tokens", std_epsilon=1e-6
    ),
    of_verl(
        "ppo",
        "compute_gae_advantage_return",
        given={"gamma": 1.0, "lam": 0.95, "kl_coef": 0.05},
        kl_coef=0.05,
        lam=0.95,
    ),
    of_openrlhf("ppo", "gae", given={"kl_coef": 0.05, "lam": 0.95}, kl_coef=0.05, lam=0.95, std="biased"),
]

LOSSES = [
    by_verl("grpo", "vanilla", {"clip_ratio_c": 3.0}, clip_ratio_c=3.0),
    by_verl("grpo", "vanilla", {"clip_ratio_c": 1.1}, "dual clip is always on, and ours is off by default"),
    by_trl("grpo", {"loss_type": "dapo"}),
    by_trl("grpo_paper", {"loss_type": "grpo", "beta": 0.04}),
    by_trl(
        "grpo_paper",
        {"loss_type": "grpo", "beta": 0.04, "arguments": {"use_bias_correction_kl": True}},
        kl_gradient="importance",
    ),
    by_trl(
        "grpo",
        {"loss_type": "dapo", "arguments": {"delta": 1.1}},
        "delta bounds the ratio where advantages are positive too",
    ),
    by_openrlhf("grpo", {}),
    by_openrlhf("grpo", {"dual_clip": 1.1}, clip_ratio_c=1.1),
    by_verl(
        "dr_grpo",
        "vanilla",
        {"clip_ratio_c": 3.0, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": MAX_LENGTH},
        clip_ratio_c=3.0,
    ),
    by_verl(
        "dr_grpo",
        "vanilla",
        {"clip_ratio_c": 3.0, "loss_agg_mode": "seq-mean-token-sum-norm"},
        "without loss_scale_factor it divides by the width of the batch, which changes from step to step",
        clip_ratio_c=3.0,
    ),
    by_trl("dr_grpo", {"loss_type": "dr_grpo"}),
    by_openrlhf("dr_grpo", {}, "its estimator changes advantages alone; the loss is a mean over tokens"),
    by_verl(
        "gspo",
        "gspo",
        {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    by_verl(
        "gspo",
        "gspo",
        {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "token-mean"},
        "by the trainer's default aggregation long responses count for more",
    ),
    by_trl(
        "gspo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    by_openrlhf("gspo", {"policy_loss_type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}),
    by_verl("cispo", "cispo", {}, is_min=0.8, is_max=1.2),
    by_verl("cispo", "cispo", {}, "it clips at PPO's 0.8 and 1.2; the paper has no lower bound"),
    by_trl("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
    by_verl("sapo", "sapo", {}),
    by_trl("sapo", {"loss_type": "sapo"}),
    by_verl(
        "dppo",
        "dppo_tv",
        {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0},
        anchor="old",
    ),
    by_verl(
        "dppo",
        "dppo_kl",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
        divergence="kl",
        anchor="old",
    ),
    by_verl(
        "dppo",
        "dppo_tv",
        {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0},
        "the ratio is to the trainer's log-probs, not to the generator's",
    ),
    loss("rloo", "TRL", "RLOOTrainer", peers.trl_rloo_loss, ratio_level="sequence"),
    by_verl("rloo", "vanilla", {"clip_ratio_c": 3.0}, ratio_level="token", loss_agg="token-mean", clip_ratio_c=3.0),
    by_openrlhf("rloo", {}, ratio_level="token", loss_agg="token-mean"),
    loss("rloo", "TRL", "RLOOTrainer", peers.trl_rloo_loss, "a clipped ratio per response; the paper has none"),
    by_openrlhf("reinforce_pp", {}),
    by_openrlhf("ppo", {}),
    by_verl("ppo", "vanilla", {"clip_ratio_c": 3.0}, clip_ratio_c=3.0),
]


def critic(peer: str, function: str, theirs: Callable[..., Tensor], clip: float) -> Case:
    mine, other = partial(ours.value_loss, clip=clip), partial(theirs, clip=clip)
    values = with_gradient(mine, critic_values), with_gradient(other, critic_values)
    return Case("ppo", "value loss", peer, function, *values, {"critic.clip": clip})


def kl(peer: str, function: str, theirs: Loss, estimator: str, gradient: str, why: str = "") -> Case:
    mine = partial(ours.kl_term, estimator=estimator, gradient=gradient)
    keys = {"kl_estimator": estimator, "kl_gradient": gradient}
    return Case("all", "KL term", peer, function, with_gradient(mine, policy), with_gradient(theirs, policy), keys, why)


SHARED = [
    critic("verl", "compute_value_loss", peers.verl_value_loss, 0.2),
    critic("OpenRLHF", "ValueLoss", peers.openrlhf_value_loss, 0.2),
    *(
        kl("verl", f"kl_penalty, {kind}", partial(peers.verl_kl, kind=kind), kind, "plain")
        for kind in ("k1", "k2", "k3")
    ),
    *(
        kl("verl", f"kl_penalty, {kind}+", partial(peers.verl_kl, kind=f"{kind}+"), kind, "straight_through")
        for kind in ("k1", "k3")
    ),
    *(
        kl(
            "OpenRLHF",
            f"compute_approx_kl, {kind}",
            partial(peers.openrlhf_kl, kind=kind, unbiased=False),
            kind,
            "plain",
        )
        for kind in ("k1", "k2", "k3")
    ),
    kl(
        "OpenRLHF",
        "compute_approx_kl, k3, unbiased_gradient",
        partial(peers.openrlhf_kl, kind="k3", unbiased=True),
        "k3",
        "importance",
        "its value isn't weighted by the ratio; the gradient is that of k2, weighted",
    ),
]


def draws(method: str, scope: str, rule: str, why: str = "") -> Case:
    keys = {"filter": rule, "filter_scope": scope}
    function = f"compute_pf_ppo_reweight_data, {method}"
    theirs = partial(peers.verl_draw_shares, method=method)
    return Case("pf_ppo", "chance to be drawn", "verl", function, partial(ours.draw_shares, scope=scope, filter=rule),
                theirs, keys, why)  # fmt: skip


DRAWS = [
    draws("max_random", "batch", "best-random"),
    draws("max_min", "batch", "best-worst"),
    draws("pow", "batch", "power"),
    draws("max_random", "prompt", "best-random", "it compares and draws over the batch, the paper over a prompt"),
]


def of_pairs(
    peer: str, function: str, theirs: Callable[..., Tensor], given: Mapping[str, Any], why: str = "", **keys: Any
) -> Case:
    """A loss of pairs of rows, of which the first is preferred."""
    mine = partial(ours.loss, name="online_dpo", **keys)

    def paired(loss: Loss) -> Values:
        return with_gradient(lambda rows, policy_R: loss(rows.as_pairs, policy_R), policy)

    values = paired(mine), paired(partial(theirs, **given))
    return Case("online_dpo", "loss", peer, _call(function, given), *values, keys, why)


PAIRS = [
    *(
        of_pairs("TRL", "DPOTrainer", peers.trl_dpo_loss, {"loss_type": loss_type}, loss_type=loss_type)
        for loss_type in ("sigmoid", "hinge")
    ),
    of_pairs(
        "TRL",
        "DPOTrainer",
        peers.trl_dpo_loss,
        {"loss_type": "robust", "label_smoothing": 0.2},
        loss_type="robust",
        label_smoothing=0.2,
    ),
    of_pairs(
        "TRL",
        "DPOTrainer",
        peers.trl_dpo_loss,
        {"loss_type": "sigmoid_norm"},
        loss_type="sigmoid",
        length_normalized=True,
    ),
    of_pairs(
        "TRL",
        "DPOTrainer",
        peers.trl_dpo_loss,
        {"loss_type": "sigmoid", "label_smoothing": 0.2},
        "label_smoothing counts in robust and exo_pair alone there",
        loss_type="sigmoid",
        label_smoothing=0.2,
    ),
    of_pairs(
        "TRL",
        "DPOTrainer",
        peers.trl_dpo_loss,
        {"loss_type": "ipo"},
        "it compares means over a response's tokens, not sums",
        loss_type="ipo",
    ),
    of_pairs("TRL", "DPOTrainer", peers.trl_dpo_loss, {"loss_type": "ipo"}, loss_type="ipo", length_normalized=True),
    of_pairs("OpenRLHF", "DPOLoss", peers.openrlhf_dpo_loss, {"label_smoothing": 0.2}, label_smoothing=0.2),
    of_pairs("OpenRLHF", "DPOLoss", peers.openrlhf_dpo_loss, {"ipo": True}, loss_type="ipo"),
]


def of_distributions(
    peer: str, function: str, theirs: Loss, given: Mapping[str, Any], why: str = "", **keys: Any
) -> Case:
    mine = partial(distributions.our_divergence, **keys)
    values = with_gradient(mine, distributions.logits), with_gradient(partial(theirs, **given), distributions.logits)
    return Case("gkd", "loss", peer, _call(function, given), *values, keys, why)


def of_scores(peer: str, function: str, theirs: Callable[..., Tensor], given: Mapping[str, Any]) -> Case:
    mine = partial(distributions.our_reward_loss, **{"centring": 0.0, **given})
    values = with_gradient(mine, distributions.scores), with_gradient(partial(theirs, **given), distributions.scores)
    return Case(REWARD_MODEL, f"loss, {_call('', given)[2:]}", peer, function, *values)


DISTRIBUTIONS = [
    of_distributions("TRL", "DistillationTrainer", distributions.trl_divergence, {"beta": 0.0}, divergence="forward"),
    of_distributions("TRL", "DistillationTrainer", distributions.trl_divergence, {"beta": 1.0}, divergence="reverse"),
    of_distributions(
        "TRL", "DistillationTrainer", distributions.trl_divergence, {"beta": 0.3}, divergence="jsd", beta=0.3
    ),
    of_distributions(
        "verl", "forward_kl_topk", distributions.verl_divergence, {"top_k": 9}, divergence="forward", top_k=9
    ),
    of_distributions(
        "verl",
        "forward_kl_topk",
        distributions.verl_divergence,
        {"top_k": 4},
        "it leaves out all other tokens, so that it is no divergence; ours compares them as one",
        divergence="forward",
        top_k=4,
    ),
    of_scores("TRL", "RewardTrainer", distributions.trl_reward_loss, {"margin": None, "centring": 0.01}),
    of_scores("TRL", "RewardTrainer", distributions.trl_reward_loss, {"margin": 0.3, "centring": 0.0}),
    of_scores("OpenRLHF", "PairWiseLoss", peers.openrlhf_reward_loss, {"margin": 0.3}),
]

DAPO = [
    by_verl(
        "dapo",
        "vanilla",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
        clip_ratio_c=10.0,
    ),
    by_trl("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
    of_openrlhf("dapo", "group_norm", given={"overlong": 3}, std_epsilon=1e-9, overlong_cache=3),
]

CORRECTIONS = [
    by_openrlhf(
        "grpo",
        {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.0, 1.1]},
        rollout_is="tis",
        rollout_is_clip=1.1,
    ),
    by_openrlhf(
        "grpo",
        {"is_correction_level": "token", "is_correction_threshold": [0.9, 1.1]},
        rollout_is="icepop",
        rollout_is_clip=(0.9, 1.1),
    ),
    by_openrlhf(
        "grpo",
        {"is_correction_level": "seq", "is_correction_threshold": [0.9, 1.1]},
        rollout_is="seq-mask-tis",
        rollout_is_clip=(0.9, 1.1, 100.0),
    ),
    by_openrlhf(
        "grpo",
        {"is_correction_level": "seq", "is_correction_threshold": [0.9, 1.1]},
        "it bounds the geometric mean of a row's ratios, not their product (TRL's bound)",
        rollout_is="seq-mask-tis",
        rollout_is_clip=(0.9, 1.1, 100.0),
        rollout_is_sequence="sum",
    ),
    by_trl("grpo", {"loss_type": "dapo", "off_policy_mask_threshold": 0.05}, off_policy_bound=0.05),
]

CASES = sorted(
    [*ADVANTAGES, *ONE_RESPONSE, *LOSSES, *DAPO, *PAIRS, *DISTRIBUTIONS, *DRAWS, *CORRECTIONS, *SHARED],
    key=lambda case: ORDER.index(case.algorithm),
)

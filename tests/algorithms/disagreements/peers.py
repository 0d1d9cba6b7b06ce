"""Functions of verl, TRL and OpenRLHF, called with padded rows. Each returns values per token or a loss."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from accelerate import Accelerator
from tests.algorithms.disagreements.padded_rows import RESPONSES, PaddedRows
from tests.algorithms.random_rows import MAX_LENGTH, PART_WEIGHTS
from torch import Tensor
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig

VERSIONS = {"verl": version("verl"), "TRL": version("trl"), "OpenRLHF": version("openrlhf")}


def _without_package_code(name: str) -> None:
    """Make modules of a package importable without its own code, which imports what only GPUs have."""
    package = types.ModuleType(name)
    package.__path__ = [str(Path(_openrlhf_folder(), *name.split(".")[1:]))]
    package.__getattr__ = lambda attribute: object  # type: ignore[method-assign]
    sys.modules[name] = package


def _openrlhf_folder() -> str:
    spec = find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    return spec.submodule_search_locations[0]


for _name in ("openrlhf.models", "openrlhf.utils", "openrlhf.trainer.ray.launcher"):
    _without_package_code(_name)
sys.modules["deepspeed"] = types.ModuleType("deepspeed")

from openrlhf.models.loss import DPOLoss, PairWiseLoss, PolicyLoss, ValueLoss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl, masked_mean  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402


def verl_advantages(rows: PaddedRows, function: str, kl_coef: float = 0.0, **options: Any) -> Tensor:
    """The first result of one of verl's advantage estimators, per token [R]."""
    if function == "compute_gae_advantage_return":
        arguments = {"values": rows.matrix(rows.rows.values), **options}
    else:
        arguments = {"index": np.asarray(rows.rows.groups), **options}
    result_BT, _ = getattr(verl, function)(
        token_level_rewards=rows.rewards_at_ends(kl_coef), response_mask=rows.mask_BT, **arguments
    )
    return rows.packed(result_BT)


def verl_gdpo(rows: PaddedRows) -> Tensor:
    """verl's GDPO advantages of two reward functions, per token [R]."""
    parts_BK, names = rows.rows.parts, ("first", "second")
    config = {"gdpo_reward_keys": list(names), "gdpo_reward_weights": list(PART_WEIGHTS)}
    prompts_B1 = torch.ones(len(parts_BK), 1)
    result_BT, _ = verl.compute_gdpo_outcome_advantage(
        token_level_rewards=rows.rewards_at_ends(),
        response_mask=rows.mask_BT,
        index=np.asarray(rows.rows.groups),
        config=config,
        non_tensor_batch=dict(zip(names, parts_BK.T, strict=True)),
        batch={"prompts": prompts_B1, "attention_mask": torch.cat([prompts_B1, rows.mask_BT], 1).long()},
    )
    return rows.packed(result_BT)


class _Drawing(Exception):
    """Carries the weights by which rows would be drawn."""


def verl_draw_shares(rows: PaddedRows, method: str) -> Tensor:
    """The chance of each row [B] to be the one that verl's PF-PPO draws: what it gives its random numbers."""

    def weigh(weights_B: Tensor, *_: Any, **__: Any) -> Tensor:
        raise _Drawing(weights_B)

    data = types.SimpleNamespace(batch={"token_level_scores": rows.rewards_at_ends()})
    with patch.object(verl.torch, "multinomial", weigh):
        try:
            verl.compute_pf_ppo_reweight_data(data, reweight_method=method, weight_pow=2.0)
        except _Drawing as drawing:
            (weights_B,) = drawing.args
    return weights_B.double() / weights_B.double().sum()


def verl_loss(rows: PaddedRows, policy_R: Tensor, mode: str, **options: Any) -> Tensor:
    """One of verl's policy losses; `options` are those of its ActorConfig and `loss_agg_mode`."""
    aggregation = options.pop("loss_agg_mode", "token-mean")
    scale = options.pop("loss_scale_factor", None)
    config = ActorConfig(strategy="fsdp", rollout_n=RESPONSES, ppo_micro_batch_size_per_gpu=1, **options)
    if scale is not None:
        config.global_batch_info["loss_scale_factor"] = scale
    loss, _ = verl.get_policy_loss_fn(mode)(
        old_log_prob=rows.matrix(rows.rows.old),
        log_prob=rows.unpacked(policy_R),
        advantages=rows.matrix(rows.token_advantages),
        response_mask=rows.mask_BT,
        loss_agg_mode=aggregation,
        config=config,
    )
    return loss


class TrlTrainer:
    """What TRL's loss methods read of a trainer."""

    def __init__(
        self, rows: PaddedRows, policy_R: Tensor | None, settings: Mapping[str, Any], arguments: Mapping[str, Any]
    ):
        self._logprobs_BT = rows.mask_BT if policy_R is None else rows.unpacked(policy_R)
        self.accelerator = Accelerator(cpu=True)
        self.model = types.SimpleNamespace(training=False)
        self.current_gradient_accumulation_steps = 1
        self.max_completion_length = MAX_LENGTH
        self.aux_loss_enabled = self.use_vllm = self._entropy_bonus_enabled = False
        self.top_entropy_quantile, self.off_policy_mask_threshold, self.beta = 1.0, None, 0.0
        self.importance_sampling_level, self.epsilon_low, self.epsilon_high = "token", 0.2, 0.2
        self._metrics: Any = {"eval": defaultdict(list)}
        known = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
        gates = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
        self.args = types.SimpleNamespace(**known | gates | dict(arguments))
        self.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
        vars(self).update(settings)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self._logprobs_BT, torch.zeros_like(self._logprobs_BT), None


def trl_loss(rows: PaddedRows, policy_R: Tensor, arguments: Mapping[str, Any] | None = None, **settings: Any) -> Tensor:
    """GRPOTrainer's loss of all rows as one micro-batch; `arguments` are those of GRPOConfig."""
    inputs = {
        **_trl_inputs(rows),
        "old_per_token_logps": rows.matrix(rows.rows.old),
        "sampling_per_token_logps": rows.matrix(rows.rows.rollout),
        "ref_per_token_logps": rows.matrix(rows.rows.reference),
        "num_items_in_batch": rows.mask_BT.sum(),
    }
    return GRPOTrainer._compute_loss(TrlTrainer(rows, policy_R, settings, arguments or {}), None, inputs)


def trl_rloo_loss(rows: PaddedRows, policy_R: Tensor) -> Tensor:
    """RLOOTrainer's loss of all rows as one micro-batch."""
    inputs = _trl_inputs(rows) | {"old_logps": rows.matrix(rows.rows.old).sum(1)}
    return RLOOTrainer._compute_loss(TrlTrainer(rows, policy_R, {}, {}), None, inputs)


def trl_dpo_loss(rows: PaddedRows, policy_R: Tensor, loss_type: str, label_smoothing: float = 0.0) -> Tensor:
    """DPOTrainer's loss of all pairs as one micro-batch; a pair's preferred row comes first in ours."""
    preferred_first = [*range(0, len(rows.mask_BT), 2), *range(1, len(rows.mask_BT), 2)]
    logprobs_BT, mask_BT = rows.unpacked(policy_R)[preferred_first], rows.mask_BT[preferred_first]
    reference_B = rows.matrix(rows.rows.reference)[preferred_first].sum(1)
    # The first token of a row has no log-prob.
    mask_BT = torch.nn.functional.pad(mask_BT, (1, 0))
    beside = {name: torch.zeros_like(logprobs_BT) for name in ("entropy", "mean_logits")}
    outputs = types.SimpleNamespace(log_probs=logprobs_BT, is_top1=logprobs_BT > 0, **beside)
    settings = {
        "beta": 0.1,
        "loss_types": [loss_type],
        "loss_weights": [1.0],
        "label_smoothing": label_smoothing,
        "precompute_ref_logps": True,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
        "_total_train_tokens": 0,
    }
    inputs = {
        "input_ids": mask_BT.long(),
        "completion_mask": mask_BT.long(),
        "ref_chosen_logps": reference_B.chunk(2)[0],
        "ref_rejected_logps": reference_B.chunk(2)[1],
    }
    trainer = TrlTrainer(rows, policy_R, settings, {})
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)


def openrlhf_dpo_loss(rows: PaddedRows, policy_R: Tensor, **options: Any) -> Tensor:
    """OpenRLHF's DPO loss; `options` are those of its DPOLoss."""
    policy_B, reference_B = rows.unpacked(policy_R).sum(1), rows.matrix(rows.rows.reference).sum(1)
    loss, _, _ = DPOLoss(0.1, **options)(policy_B[::2], policy_B[1::2], reference_B[::2], reference_B[1::2])
    return loss


def openrlhf_reward_loss(rows: PaddedRows, scores_B: Tensor, margin: float | None) -> Tensor:
    return PairWiseLoss()(scores_B[::2], scores_B[1::2], margin)


def _trl_inputs(rows: PaddedRows) -> dict[str, Tensor]:
    ids_BT = torch.zeros(rows.mask_BT.shape, dtype=torch.int64)
    return {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": ids_BT[:, :1],
        "completion_ids": ids_BT,
        "completion_mask": rows.mask_BT,
        "advantages": torch.tensor(rows.advantages_B),
    }


def openrlhf_advantages(
    rows: PaddedRows, estimator: str, kl_coef: float = 0.0, lam: float = 1.0, overlong: int | None = None
) -> Tensor:
    """What OpenRLHF's experience maker makes of a batch, per token [R]; `overlong` is its overlong_buffer_len."""
    namespace = types.SimpleNamespace
    advantage = namespace(estimator=estimator, gamma=1.0, lambd=lam, no_std_norm=False)
    off = namespace(overlong_buffer_len=overlong, overlong_penalty_factor=1.0, stop_properly_penalty_coef=None)
    args = namespace(
        rollout=namespace(n_samples_per_prompt=RESPONSES, max_new_tokens=MAX_LENGTH),
        algo=namespace(advantage=advantage),
        reward=namespace(clip_range=None, **vars(off)),
    )
    experience = namespace(
        rewards=torch.tensor(rows.rows.rewards),
        index=list(range(len(rows.rows.lengths))),
        kl=rows.matrix([rows.rows.kl(row) for row in range(len(rows.rows.lengths))]),
        action_mask=rows.mask_BT,
        values=rows.matrix(rows.rows.values),
        response_length=rows.mask_BT.sum(1),
        info={},
    )
    maker = namespace(
        strategy=namespace(args=args),
        kl_ctl=namespace(value=kl_coef),
        advantage_estimator=estimator,
        get_advantages_and_returns=lambda *given: RemoteExperienceMaker.get_advantages_and_returns(None, *given),
        get_cumulative_returns=lambda *given: RemoteExperienceMaker.get_cumulative_returns(None, *given),
    )
    RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])
    return rows.packed(experience.advantages)


def openrlhf_loss(rows: PaddedRows, policy_R: Tensor, **options: Any) -> Tensor:
    """OpenRLHF's policy loss; `options` are those of its PolicyLoss."""
    return PolicyLoss(**options)(
        rows.unpacked(policy_R),
        rows.matrix(rows.rows.old),
        rows.matrix(rows.token_advantages),
        action_mask=rows.mask_BT,
        rollout_log_probs=rows.matrix(rows.rows.rollout),
    )[0]


def verl_value_loss(rows: PaddedRows, values_R: Tensor, clip: float) -> Tensor:
    before_BT, returns_BT = rows.matrix(rows.rows.values), rows.matrix(rows.rows.returns)
    return verl.compute_value_loss(rows.unpacked(values_R), returns_BT, before_BT, rows.mask_BT, clip)[0]


def openrlhf_value_loss(rows: PaddedRows, values_R: Tensor, clip: float) -> Tensor:
    before_BT, returns_BT = rows.matrix(rows.rows.values), rows.matrix(rows.rows.returns)
    return ValueLoss(clip)(rows.unpacked(values_R), before_BT, returns_BT, rows.mask_BT)


def verl_kl(rows: PaddedRows, policy_R: Tensor, kind: str) -> Tensor:
    """verl's KL term, its mean over tokens."""
    term_BT = verl.kl_penalty(rows.unpacked(policy_R), rows.matrix(rows.rows.reference), kind)
    return rows.packed(term_BT).mean()


def openrlhf_kl(rows: PaddedRows, policy_R: Tensor, kind: str, *, unbiased: bool) -> Tensor:
    """OpenRLHF's KL term, its mean over tokens."""
    term_BT = compute_approx_kl(
        rows.unpacked(policy_R), rows.matrix(rows.rows.reference), rows.matrix(rows.rows.old), kind, unbiased
    )
    return masked_mean(term_BT, rows.mask_BT)

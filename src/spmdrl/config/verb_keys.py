"""Keys that each verb reads, and counterparts of another verb's keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from spmdrl.config.given import within

_MODELS_AND_ROWS = "model data run seed resources"
_TRAINED = (
    f"{_MODELS_AND_ROWS} resume lora train -train.max_steps -train.epochs -train.updates_per_step "
    "-train.epochs_per_step -train.skip_zero_advantage -train.routing.replay checkpoint -checkpoint.keep_rollouts log "
    "-log.samples_per_step"
)
_ANSWERS = (
    "rollout -rollout.prompts_per_step -rollout.num_generations -rollout.partial_max_rounds "
    "-rollout.partial_extra_prompts environment"
)
# Evaluations sample as the section eval says, and score by functions alone.
_JUDGED = (
    f"{_ANSWERS} -rollout.temperature -rollout.top_p -rollout.top_k -rollout.min_p -rollout.ignore_eos reward "
    "-reward.model -reward.judge -reward.max_error_rate"
)
_OF_PAIRS = f"{_TRAINED} -resources.generation eval.interval eval.before_train eval.max_rows"
_ALONE = f"{_MODELS_AND_ROWS} -data.train -data.split -data.max_rows -data.shuffle -resources.update"

_READ: Mapping[str, frozenset[str]] = {
    verb: frozenset(keys.split())
    for verb, keys in {
        "train": "* -preferences -reward_model",
        "sft": f"{_TRAINED} {_JUDGED} sft eval reshard",
        "preferences": f"{_OF_PAIRS} reference preferences",
        "reward-model": f"{_OF_PAIRS} reward_model",
        "eval": f"{_ALONE} {_JUDGED} eval -eval.interval -eval.before_train",
        "generate": f"{_ALONE} {_ANSWERS} resume eval.num_samples eval.max_rows",
        "replay": "* -sft -preferences -reward_model -eval -data.eval -checkpoint -log -run -resume "
        "-debug.rollouts_to -resources.update -resources.generation -reference "
        "-critic.layout -teacher.layout -reward.model.layout -reward.judge.layout",
    }.items()
}
"""sections and keys by the verb that reads them; * is all, and the longest entry that holds a key decides"""

OWN = {"sft": "sft", "preferences": "preferences", "reward-model": "reward_model"}
"""section of a verb that trains on data alone: its steps, its optimizer"""
STEPS = {verb: (f"{section}.max_steps", f"{section}.epochs") for verb, section in {"train": "train", **OWN}.items()}
"""keys of the steps of each verb that trains; a file with one may have all keys of that verb"""
# Counterparts with another name.
_SAME = {
    "rollout.prompts_per_step": "rows_per_step", "algo.kl_coef": "beta", "algo.loss_agg": "loss_type",
    "rollout.num_generations": "num_samples", "train.epochs_per_step": "epochs",
}  # fmt: skip


def is_read(verb: str, key: str) -> bool:
    """Return True if the verb reads the key."""
    names = key.split(".")
    for length in range(len(names), 0, -1):
        start = ".".join(names[:length])
        if {start, f"-{start}"} & _READ[verb]:
            return start in _READ[verb]
    return "*" in _READ[verb]


def counterpart(verb: str, key: str, keys: Collection[str], *, own: bool = False) -> str | None:
    """Return the key that a verb reads in place of this one; with `own`, only in its own section."""
    homes = [OWN[verb]] if verb in OWN else [] if own else ["", "train", "algo"] if verb == "train" else []
    homes += [] if own or verb in ("train", "replay") else ["eval", "rollout"]
    tails = [_SAME.get(key, key), key.partition(".")[2]]
    if verb == "train" and tails[1] == "rows_per_step":
        return "rollout.prompts_per_step"
    found = (f"{home}.{tail}".strip(".") for tail in tails for home in homes if tail)
    return next((name for name in found if name in keys and is_read(verb, name)), None)


def summarised(unread: Iterable[str], read: Iterable[str]) -> list[str]:
    """Replace keys by their section if no key of the section is read."""
    others, found = list(read), dict[str, None]()
    for key in unread:
        names = key.split(".")
        starts = [".".join(names[:length]) for length in range(1, len(names) + 1)]
        found[next((start for start in starts if not any(within(other, start) for other in others)), key)] = None
    return list(found)

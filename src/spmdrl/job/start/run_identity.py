"""What must not change between the parts of one run, or its steps would mean something else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.dataflow.data.data_rows import SourceRows
from spmdrl.engines.models.hf.fingerprint import fingerprint
from spmdrl.job.start.start_checks import CheckedRun
from spmdrl.nouns.roles import JUDGE, POLICY, REWARD_MODEL, TEACHER, Role

ROWS = "rows of data.train"
CRITIC = "critic"
TEACHERS_WEIGHTS = "the teacher's weights"
REWARD_MODELS_WEIGHTS = "the reward model's weights"
LORA = "lora"
JUDGES_WEIGHTS = "the judge's weights"
OPTIONAL = (CRITIC, TEACHERS_WEIGHTS, REWARD_MODELS_WEIGHTS, JUDGES_WEIGHTS, LORA)
"""keys that runs without such a thing don't have"""


def identity_of(checked: CheckedRun, folders: Mapping[Role, Path]) -> dict[str, Any]:
    """The run by its settings, its data and the folders of the models that it starts from, as plain JSON values.

    Raises ValueError where the model can't be read.
    """
    config, held = checked.config, fingerprint(folders[POLICY])
    sizes: dict[str, Any] = {
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "rollout.num_generations": config.rollout.num_generations,
        "algo.name": config.algo.name,
        # Rows that were begun have turns or not.
        "an environment": config.environment.function is not None,
    } if checked.offline is None else {f"{checked.section}.rows_per_step": checked.rows_per_step}  # fmt: skip
    if config.critic is not None and checked.offline is None:
        sizes[CRITIC] = "a model of its own" if config.critic.path else "the policy's weights"
    weights = {TEACHER: TEACHERS_WEIGHTS, REWARD_MODEL: REWARD_MODELS_WEIGHTS, JUDGE: JUDGES_WEIGHTS}
    for role, key in weights.items():
        if role in folders:
            sizes[key] = fingerprint(folders[role]).weights[:16]
    if config.lora is not None:
        targets = ", ".join(sorted(config.lora.targets)) or "all projections"
        sizes[LORA] = f"rank {config.lora.rank}, alpha {config.lora.alpha:g}, {targets}"
    if config.data.on_bad_row == "skip":
        # It decides which rows there are.
        sizes["data.max_prompt_length"] = config.data.max_prompt_length
    return {
        "phase": checked.phase,
        "seed": config.seed,
        "data.train": str(config.data.train),
        "data.shuffle": config.data.shuffle,
        ROWS: rows_digest(checked.train_rows, learns_completions=checked.phase == "sft"),
        **sizes,
        "the chat template's options": config.data.template.described,
        **{f"the model's {key}": value for key, value in held.architecture.items()},
        "the model's weights at the start": held.weights[:16],
        "the model's tokenizer": held.tokenizer[:16],
    }


def rows_digest(rows: Sequence[SourceRows], *, learns_completions: bool) -> str:
    """A short digest of what is used of the rows, wherever their files are."""
    digest = hashlib.sha256()
    for source in rows:
        digest.update(f"{len(source.rows)}:{source.source.weight}:".encode())
        for row in source.rows:
            learnt = (row.answer,) if row.rejected is None else (row.completion, row.rejected)
            if learns_completions and row.completion is not None:
                learnt = (row.answer, row.completion)
            digest.update(repr((row.prompt, *learnt)).encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]

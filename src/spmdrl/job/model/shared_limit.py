"""The micro-batch limit of a run: shared by its models, and remembered in its folder once memory has run out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from spmdrl.engines.training.microbatch import MOST_HALVINGS, MicrobatchLimit
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_folder import on_main
from spmdrl.nouns.roles import POLICY
from spmdrl.observability.jsonl import write_atomic
from spmdrl.observability.outage import going_on_without

LIMIT_FILE = "microbatch_limit.json"


def share_limit(models: RoleModels, run: Run) -> None:
    """Give all models of a run one limit, as low as an earlier attempt had to set it. Collective."""
    trainer = models[POLICY].trainer
    first = trainer.training.tokens_per_microbatch(trainer.device.kind)
    limit, path = MicrobatchLimit(first), run.folder / LIMIT_FILE
    limit.num_halvings = on_main(run.world, lambda: _halvings_in(path, first))
    if limit.num_halvings:
        run.console.note(
            f"train.max_tokens_per_microbatch is {limit.tokens}: {first} were more than memory has, as {path} records"
        )
    limit.when_halved = partial(_note_halved, run, path, limit, first)
    run.lower_limit = partial(_lower_for_next, path, limit, first)
    for model in models.values():
        model.trainer.fitted.limit = limit


def _note_halved(run: Run, path: Path, limit: MicrobatchLimit, first: int, words: str) -> None:
    run.console.note(
        f"WARNING: {words}; the pass is done again, from here on with train.max_tokens_per_microbatch {limit.tokens} "
        f"(halved {limit.num_halvings} of at most {MOST_HALVINGS} times)"
    )
    if run.world.is_main:
        _write(path, first, limit.num_halvings)


def _lower_for_next(path: Path, limit: MicrobatchLimit, first: int) -> str:
    """Where a pass can't be done again: the next attempt begins with half. Any rank may call it."""
    if limit.num_halvings == MOST_HALVINGS:
        return f"; it was halved {MOST_HALVINGS} times, to {limit.tokens}"
    _write(path, first, limit.num_halvings + 1)
    return f"; the same command goes on with {limit.after(limit.num_halvings + 1)}"


def _write(path: Path, first: int, num_halvings: int) -> None:
    with going_on_without(str(path)):
        write_atomic(path, json.dumps({"tokens": first, "halvings": num_halvings}) + "\n")


def _halvings_in(path: Path, first: int) -> int:
    """How often an earlier attempt with the same setting halved it."""
    try:
        record = json.loads(path.read_text())
        return min(MOST_HALVINGS, int(record["halvings"])) if record["tokens"] == first else 0
    except (OSError, ValueError, LookupError, TypeError):
        return 0

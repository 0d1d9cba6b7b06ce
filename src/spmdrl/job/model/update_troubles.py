"""Failed updates: rows of skipped ones are written down, and the token limit is halved when memory runs out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.engines.training.checkpoints.checkpoint import WRITE_FAILURES
from spmdrl.engines.training.checkpoints.manifest import step_folder_name
from spmdrl.engines.training.microbatch import MOST_HALVINGS, MicrobatchLimit
from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.engines.training.updater import UpdateResult
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_folder import on_main
from spmdrl.nouns.roles import POLICY
from spmdrl.observability.jsonl import to_json, write_atomic
from spmdrl.observability.outage import best_effort

FOLDER = "skipped"
# The first ones show the problem; a run that continues so must not fill the disk.
MOST_BATCHES = 8
_MOST_BYTES = 1 << 26
_MOST_NAMED = 8


def watch_updates(models: RoleModels, run: Run) -> None:
    """Write down the rows of the first skipped updates, and give all models one limit of tokens. Collective.

    The limit is as low as an earlier attempt had to set it.
    """
    kept, limit = SkippedBatches(run), _shared_limit(models[POLICY].trainer, run)
    for role, model in models.items():
        model.trainer.fitted.limit = limit
        if model.trainer.updater is not None:
            model.trainer.when_skipped = partial(kept.keep, role.name, model.trainer)


class SkippedBatches:
    """Each rank's part of a skipped update on disk: rows as safetensors, findings as JSON."""

    def __init__(self, run: Run):
        self._run = run
        self._root = run.folder / FOLDER
        # Counted before any rank writes, so the same on all of them.
        self._num_kept = len(list(self._root.glob("*")))

    def keep(self, name: str, trainer: TrainingEngine, rows: TokenRows, result: UpdateResult) -> None:
        """Write the rows of a skipped update of the model `name`, up to a limit."""
        if self._num_kept >= MOST_BATCHES:
            return
        self._num_kept += 1
        run, step = self._run, self._run.present_step
        folder = self._root / f"{step_folder_name(step)}_{name}_{self._num_kept}"
        columns = _columns_of(rows)
        broken = {column: found for column, values in columns.items() if (found := _broken_rows(rows, values))}
        if trainer.mesh.model.rank == 0:
            record = {"step": step, "model": name, "rows": len(rows), "not_finite": broken}
            record |= {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
            with best_effort(f"the batch in {folder}", WRITE_FAILURES):
                _write(folder / f"rank_{run.world.rank:05d}", record, columns)
        what = "; ".join(f"{column} of row {found[0]} isn't finite" for column, found in broken.items())
        run.console.note(f"step {step}: the rows of the skipped update are in {folder}" + (f": {what}" if what else ""))


def _columns_of(rows: TokenRows) -> dict[str, Tensor]:
    """Return the rows by name: tokens, offsets, and the loss's columns of response tokens."""
    columns = {"tokens": rows.tokens_T, "offsets": rows.offsets, "prompt_lengths": rows.prompt_lengths_B}
    if rows.is_model_T is not None:
        columns["is_model"] = rows.is_model_T
    return columns | {f"response/{name}": values for name, values in rows.response.items()}


def _broken_rows(rows: TokenRows, values: Tensor) -> list[int]:
    """Return the first of this rank's rows with a value that isn't finite."""
    if not values.is_floating_point() or values.isfinite().all():
        return []
    places = (~values.isfinite()).reshape(len(values), -1).any(1).nonzero().squeeze(1).cpu()
    found = torch.searchsorted(rows.response_offsets, places, right=True) - 1
    return found.unique().tolist()[:_MOST_NAMED]


def _write(path: Path, record: Mapping[str, object], columns: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(values.nbytes for values in columns.values())
    path.with_suffix(".json").write_text(to_json({**record, "bytes": num_bytes}) + "\n")
    if num_bytes <= _MOST_BYTES:
        save_file({name: values.contiguous() for name, values in columns.items()}, path.with_suffix(".safetensors"))


LIMIT_FILE = "microbatch_limit.json"


def _shared_limit(trainer: TrainingEngine, run: Run) -> MicrobatchLimit:
    first = trainer.training.tokens_per_microbatch(trainer.device.kind)
    limit, path = MicrobatchLimit(first), run.folder / LIMIT_FILE
    limit.num_halvings = on_main(run.world, lambda: _halvings_in(path, first))
    if limit.num_halvings:
        run.console.note(
            f"train.max_tokens_per_microbatch is {limit.tokens}: {first} were more than memory has, as {path} records"
        )
    limit.when_halved = partial(_note_halved, run, path, limit, first)
    run.lower_limit = partial(_lower_for_next, path, limit, first)
    return limit


def _note_halved(run: Run, path: Path, limit: MicrobatchLimit, first: int, words: str) -> None:
    run.console.note(
        f"WARNING: {words}; the pass is done again, from here on with train.max_tokens_per_microbatch {limit.tokens} "
        f"(halved {limit.num_halvings} of at most {MOST_HALVINGS} times)"
    )
    if run.world.is_main:
        _write_limit(path, first, limit.num_halvings)


def _lower_for_next(path: Path, limit: MicrobatchLimit, first: int) -> str:
    """Let the next attempt begin with half, if a pass can't be repeated. Any rank may call it."""
    if limit.num_halvings == MOST_HALVINGS:
        return f"; it was halved {MOST_HALVINGS} times, to {limit.tokens}"
    _write_limit(path, first, limit.num_halvings + 1)
    return f"; the same command goes on with {limit.after(limit.num_halvings + 1)}"


def _write_limit(path: Path, first: int, num_halvings: int) -> None:
    with best_effort(str(path)):
        write_atomic(path, json.dumps({"tokens": first, "halvings": num_halvings}) + "\n")


def _halvings_in(path: Path, first: int) -> int:
    """Return how often an earlier attempt with the same setting halved it."""
    try:
        record = json.loads(path.read_text())
        return min(MOST_HALVINGS, int(record["halvings"])) if record["tokens"] == first else 0
    except (OSError, ValueError, LookupError, TypeError):
        return 0

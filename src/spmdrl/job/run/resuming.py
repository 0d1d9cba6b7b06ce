"""The checkpoint that a run resumes from: sound, of this very run, and complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BeforeValidator, Strict, StrictFloat, StrictInt, TypeAdapter, ValidationError

from spmdrl.config.config import Config
from spmdrl.dataflow.data.data_rows import SourceRows
from spmdrl.engines.models.hf.fingerprint import fingerprint
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore, model_dtype
from spmdrl.engines.training.checkpoints.manifest import damage, read_manifest
from spmdrl.job.model.model_source import CHECKPOINTS, MODEL, ModelSource
from spmdrl.job.run.best_checkpoint import BestStep
from spmdrl.job.run.run_folder import check_disk_space, num_parameters, on_main
from spmdrl.job.run.savable import Savable
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.roles import JUDGE, POLICY, REWARD_MODEL, TEACHER, Role
from spmdrl.observability.jsonl import write_atomic
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG, changed_settings
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.fence import arm_fence, take_folder

RUN_FILE = "run.json"
Number = StrictInt | StrictFloat


@dataclass(frozen=True)
class RunRecord:
    """The state of a run beside the training state; run.json of a checkpoint."""

    step: Annotated[int, Strict(), Ge(0)]
    identity: Mapping[str, Any]
    is_finished: Annotated[bool, Strict()] = False
    """true if the run was ended before its last step"""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """metrics of the newest step"""
    accuracy_before: Number | None = None
    accuracy_before_interval: list[Number] | None = None
    best: Annotated[
        tuple[BestStep, ...], BeforeValidator(lambda best: [best] if isinstance(best, dict) else best or ())
    ] = ()
    """steps kept for their values, best first; older versions have a single one, or null"""
    unlogged: Mapping[str, tuple[Literal["mean", "total", "alike", "max", "min"], Number, Number]] = field(
        default_factory=dict
    )
    """all ranks' records of `step`, if the run was stopped in the evaluation after it: logged on resuming"""
    is_resumable: Annotated[bool, Strict()] = True
    """true with the trainer's state"""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def of_json(cls, text: str | bytes) -> RunRecord:
        """Parse a record, ignoring unknown fields; raises ValueError for anything else."""
        try:
            return TypeAdapter(cls).validate_python(json.loads(text))
        except ValidationError as failure:
            place = failure.errors()[0]["loc"]
            raise ValueError(f"{RUN_FILE} has no usable {place[0] if place else 'object'}") from None
        except (ValueError, RecursionError) as failure:
            raise ValueError(f"{RUN_FILE} can't be read ({type(failure).__name__}: {failure})") from None


@dataclass(frozen=True)
class ResumePoint:
    """A sound checkpoint to resume from."""

    folder: Path
    record: RunRecord


class Resuming:
    """The checkpoint that a run resumes from: chosen before models are loaded, and read afterwards."""

    def __init__(
        self, store: CheckpointStore, config: Config, world: World, *, identity: Mapping[str, Any], console: Console,
        num_parameters: int = 0,
    ):  # fmt: skip
        """Choose the checkpoint that `resume` allows. Collective.

        Raises ConfigError on every rank if the checkpoints there can't be used, or belong to another run.
        """
        self.store = store
        self._config = config
        self._world = world
        self.identity = identity
        """settings that must not change between the parts of a run"""
        self.num_parameters = num_parameters
        """number of the policy's parameters, for the record"""
        self._console = console
        self._passed_over: dict[Path, str] = {}
        """damage by folder, found so far"""
        self._steps = on_main(world, store.steps)
        self.point = self._chosen()

    def take_folder(self) -> None:
        """Keep earlier jobs from writing, and choose again if checkpoints have been added since. Collective."""
        folder = self._config.run.folder
        # An earlier job that lost its lock, and still runs elsewhere, writes nothing from here on.
        arm_fence(folder, on_main(self._world, lambda: take_folder(folder).decode()).encode())
        if on_main(self._world, self.store.steps) != self._steps:
            self.point = self._chosen()

    def read(self, state: Savable) -> ResumePoint | None:
        """Restore the state; None if the run begins with its first step. Collective.

        A checkpoint with correct digests but unreadable content is damaged too: the previous one is used.
        """
        while self.point is not None and (problem := self._problem_of_reading(state, self.point.folder)):
            self._passed_over[self.point.folder] = problem
            self.point = self._chosen()
        return self.point

    def _chosen(self) -> ResumePoint | None:
        def choose() -> list[Any]:
            folder, notes = self._chosen_folder()
            if folder is None:
                return [None, None, notes]
            record = read_record(folder)
            notes += self._check_record(record, folder)
            # A checkpoint replaced by a later step is gone, if the run continues from before that step.
            there = tuple(one for one in record.best if self.store.folder_of(one.step).is_dir())
            return [str(folder), replace(record, best=there).to_json(), notes]

        folder, record, notes = on_main(self._world, choose)
        for note in notes:
            self._console.note(note)
        return None if folder is None else ResumePoint(Path(folder), RunRecord.of_json(record))

    def _chosen_folder(self) -> tuple[Path | None, list[str]]:
        store, wanted = self.store, self._config.resume
        if wanted not in ("auto", "never"):
            step = self._config.resume_step
            folder = Path(wanted) if step is None else store.folder_of(step)
            problem = self._damage_of(folder)
            if problem is not None:
                sound = [one for one in store.steps() if self._damage_of(store.folder_of(one)) is None]
                raise ValueError(
                    f"resume is {wanted!r}, but {folder} can't be used: {problem}; steps that can: {sound}"
                )
            return folder, []
        complaints: list[str] = []
        for step in reversed(store.steps()):
            folder = store.folder_of(step)
            problem = self._damage_of(folder)
            if problem is None:
                return folder, [f"WARNING: damaged checkpoint passed over: {complaint}" for complaint in complaints]
            complaints.append(f"{folder}: {problem}")
        if complaints:
            raise ValueError(
                f"every checkpoint in {store.root} is damaged, and none was touched: {'; '.join(complaints)}; restore "
                f"one of them, or start anew with resume=never, which moves this folder aside"
            )
        return None, []

    def _damage_of(self, folder: Path) -> str | None:
        """Return the damage found by the store, or a record that isn't of this folder's step."""
        if folder in self._passed_over:
            return self._passed_over[folder]
        problem = damage(folder, self.store.required)
        if problem is not None:
            return problem
        try:
            record, manifest = read_record(folder), read_manifest(folder)
        except (OSError, ValueError) as failure:
            return str(failure)
        return None if record.step == manifest.step else f"its {RUN_FILE} is of step {record.step}, not {manifest.step}"

    def _check_record(self, record: RunRecord, folder: Path) -> list[str]:
        """Raise ValueError for a checkpoint of another run, or without a trainer's state; returns notes."""
        changed = differences(record.identity, self.identity)
        if changed:
            raise ValueError(
                f"{folder} belongs to another run: {'; '.join(changed)}; set {self._config.run.folder_key} to a new "
                "one, or resume=never to start anew in this folder (model.path takes the model of a checkpoint)"
            )
        if not record.is_resumable:
            raise ValueError(
                f"{folder} was written with checkpoint.model_only, so that it can't be resumed; "
                "resume=never starts anew, resume=STEP takes an earlier checkpoint, and "
                f"model.path={folder / MODEL} begins another run"
            )
        unknown = [key for key in self.identity if key not in record.identity and key not in OPTIONAL]
        return [f"{folder} doesn't record {', '.join(unknown)}; taken to be the same as now"] if unknown else []

    def _problem_of_reading(self, state: Savable, folder: Path) -> str:
        """Read the state; returns the problem of the first rank that failed, or "", on every rank. Collective."""
        problem = ""
        try:
            with self._console.doing("reading the checkpoint"):
                state.read_from(folder)
        except Exception as failure:
            # The files may hold anything, and this block only reads them.
            problem = f"{type(failure).__name__}: {failure}"
        return next((part.decode() for part in gather_bytes(problem.encode()) if part), "")


def admit(checked: CheckedRun, sources: Mapping[Role, ModelSource], world: World, console: Console) -> Resuming:
    """Choose the checkpoint to resume from, before loading models and writing anything. Collective.

    Raises ConfigError on every rank where the folder holds another run, no checkpoint that can be used, or too little
    space.
    """
    config = checked.config
    store = CheckpointStore(
        config.run.folder / CHECKPOINTS, config.checkpoint, is_main=world.is_main,
        required=(RUN_FILE, f"{MODEL}/config.json"),
    )  # fmt: skip
    folders, adapters = {role: source.folder for role, source in sources.items()}, sources[POLICY].adapters
    started = {} if adapters is None else {ADAPTERS: adapters.digest}
    identity = on_main(world, lambda: identity_of(checked, folders) | started)
    size = num_parameters(sources[POLICY].decoder)
    resuming = Resuming(store, config, world, identity=identity, console=console, num_parameters=size)
    store.remove_leftovers()
    record = resuming.point.record if resuming.point else RunRecord(0, identity)
    steps_left = 0 if record.is_finished else checked.num_steps - record.step
    if steps_left > 0:
        decoders = [source.decoder for role, source in sources.items() if role.checkpoint is not None]
        dtype = model_dtype(config.checkpoint, compute_dtype(config.model, world.device.kind))
        on_main(world, lambda: check_disk_space(config.run, store, decoders, dtype, num_steps=steps_left))
    return resuming


def read_record(folder: Path) -> RunRecord:
    """Return a checkpoint's record of its run. Raises ValueError if it is damaged."""
    try:
        content = (folder / RUN_FILE).read_bytes()
    except OSError as failure:
        raise ValueError(f"{RUN_FILE} can't be read ({type(failure).__name__}: {failure})") from None
    return RunRecord.of_json(content)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List differences between two identities, omitting keys of only one of them, except optional ones."""
    changed = [key for key in now if key in before and before[key] != now[key]]
    if before.get(ROWS) == now.get(ROWS) is not None:
        # The same rows in another place.
        changed = [key for key in changed if key != "data.train"]
    changed += [key for key in OPTIONAL if (key in before) != (key in now)]
    return [f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed]


ROWS = "rows of data.train"
CRITIC = "critic"
TEACHERS_WEIGHTS = "the teacher's weights"
REWARD_MODELS_WEIGHTS = "the reward model's weights"
LORA = "lora"
OPTIMIZER = "the optimizer"
ADAPTERS = "the adapters at the start"
JUDGES_WEIGHTS = "the judge's weights"
OPTIONAL = (CRITIC, TEACHERS_WEIGHTS, REWARD_MODELS_WEIGHTS, JUDGES_WEIGHTS, LORA, OPTIMIZER, ADAPTERS)
"""keys that runs may lack"""


def identity_of(checked: CheckedRun, folders: Mapping[Role, Path]) -> dict[str, Any]:
    """Return the run's identity: its settings, data and initial models' folders, as plain JSON values.

    Raises ValueError if the model can't be read.
    """
    config, held = checked.config, fingerprint(folders[POLICY])
    sizes: dict[str, Any] = {
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "rollout.num_generations": config.rollout.num_generations,
        "algo.name": config.algo.name,
        # Pending rows have turns or not.
        "an environment": config.environment.key is not None,
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
    # Runs that don't say use AdamW.
    if "muon" in (names := [checked.optim_of(role).name for role in folders if role.is_trained]):
        sizes[OPTIMIZER] = ", ".join(names)
    if config.data.on_bad_row == "skip":
        # It decides the set of rows.
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
    """Return a short digest of the used parts of the rows, wherever their files are."""
    digest = hashlib.sha256()
    for source in rows:
        digest.update(f"{len(source.rows)}:{source.source.weight}:".encode())
        for row in source.rows:
            learnt = (row.answer,) if row.rejected is None else (row.completion, row.rejected)
            if learns_completions and row.completion is not None:
                learnt = (row.answer, row.completion)
            digest.update(repr((row.prompt, *learnt)).encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def keep_config(resolved: str, folder: Path, point: ResumePoint | None, console: Console, *, is_finished: bool) -> None:
    """Write the resolved configuration; if it changed at the point, print the changes, and keep the earlier one too.

    A finished run keeps its own.
    """
    path = folder / RESOLVED_CONFIG
    if point is not None:
        step, source = point.record.step, point.folder / RESOLVED_CONFIG
        before = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
        changes = list(changed_settings(before, resolved))
        for key, old, new in changes:
            console.note(
                f"{key} was {old} in all of the run: {new} has no effect"
                if is_finished
                else f"{key} was {old} until step {step} and is {new} from here"
            )
        if is_finished:
            return
        if changes:
            write_atomic(folder / resolved_config_until(step), before)
    write_atomic(path, resolved)


def resolved_config_until(step: int) -> str:
    """Return the name of the file with a run's configuration until a step."""
    return f"config.resolved.step_{step:06d}.yaml"

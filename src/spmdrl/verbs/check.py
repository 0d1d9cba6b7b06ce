"""The `check` verb: prints whether a verb would start, what its config means, and any reason against it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence

from spmdrl.config.config import Config
from spmdrl.config.given import DEFAULT, inline, shortened, value_leaves
from spmdrl.config.reader import LoadedConfig, start_up
from spmdrl.dataflow.data.prompts import LearntRows, PromptSource
from spmdrl.engines.environment.environment_runner import name_of_tool
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.job.rollouts.rank_split import split_line
from spmdrl.job.settings_of_run import with_settings_of_run
from spmdrl.job.start.checked_rows import unread_columns
from spmdrl.job.start.checked_run import ON_PAIRS, CheckedRun, Verb
from spmdrl.job.start.estimates import estimate_lines, needed_bytes
from spmdrl.job.start.machine_check import CheckLine, machine_lines
from spmdrl.job.start.prepared import Prepared, prepare_without_weights
from spmdrl.job.start.reward_lint import lint_rewards
from spmdrl.job.start.start_checks import check_run
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.resources.device import find_device
from spmdrl.resources.host_memory import free_host_bytes
from spmdrl.runtime.launch import LaunchEnvironment, read_launch_environment
from spmdrl.runtime.screen import show, waiting


def main(
    loaded: LoadedConfig[Config], verb: Verb = "train", prompts: Sequence[str] = (), *,
    planned: LaunchEnvironment | None = None, device_gib: int | None = None,
    is_linted: bool = False, is_whole: bool = False,
) -> int:  # fmt: skip
    """Print whether `verb` would start, then its plan; trains nothing.

    Raises the errors that the verb would raise before its first step. `planned` is another job to check for, whose
    devices needn't be here; `device_gib` is the memory of each. With `is_linted` rewards are scored on responses of
    known worth; with `is_whole` the whole config is printed. Returns 1 if a line failed. Collective under a launcher,
    unless another job is planned.
    """
    own = read_launch_environment(os.environ)
    launch = planned or own
    loaded, checked, prepared = refuse_what_ranks_would(loaded, verb, planned, prompts)
    machine = [] if planned is not None else machine_lines(checked, prepared, own)
    if own.rank != 0:
        return int(not all(line.passed for line in machine))
    wanted = checked.config.resources.device
    # A given memory size belongs to devices which needn't be here.
    here = "cuda" if device_gib is not None and find_device("auto", 0).is_cpu else find_device("auto", 0).kind
    kind = here if wanted == "auto" else wanted
    memory = _memory(needed_bytes(checked, prepared, launch, kind), launch, kind, device_gib, is_here=not planned)
    lint: list[CheckLine] = []
    if is_linted:
        rows, turns = [*checked.train_rows, *checked.eval_rows], checked.config.environment.key is not None
        with start_up(), waiting("scoring responses of known worth"):
            lint = lint_rewards(checked.config.reward, rows, has_turns=turns)
    failed = [line.text for line in (memory, *machine, *lint) if not line.passed]
    shown, folded = ([memory, *machine, *lint], []) if is_whole else (lint, machine)
    subjects = ", ".join(line.text.partition(":")[0] for line in folded if line.passed)
    page = [
        *_verdict(checked, prepared, launch, failed, [memory, *machine]),
        *([] if is_whole else _changed(loaded)),
        *_layouts(checked, launch),
        *estimate_lines(checked, prepared, launch, kind),
        *(f"ok     {line.text}" for line in shown if line.passed),
        *([f"ok     {subjects}; --all has the figures"] if subjects else []),
    ]
    show(checked.resolved_config + "\n".join(f"# {text}" for text in page) if is_whole else "\n".join(page))
    return int(bool(failed))


def refuse_what_ranks_would(
    loaded: LoadedConfig[Config], verb: Verb, planned: LaunchEnvironment | None, prompts: Sequence[str] = ()
) -> tuple[LoadedConfig[Config], CheckedRun, Prepared]:
    """Return the config, and all other inputs of a verb's ranks; raises their errors before the start."""
    loaded = with_settings_of_run(loaded, verb)
    checked = check_run(loaded, verb, prompts, launch=planned)
    prepared = prepare_without_weights(checked)
    return loaded, checked if prepared.train_prompts is None else checked.counted(len(prepared.prompts)), prepared


def _memory(needed: int, launch: LaunchEnvironment, kind: str, device_gib: int | None, *, is_here: bool) -> CheckLine:
    """Compare a rank's state with the available memory."""
    there, where = device_gib and device_gib << 30, "a device"
    if there is None and is_here and kind == "cpu":
        there, where = free_host_bytes() // launch.local_world_size, "the host's free memory for each rank"
    elif there is None and is_here:
        found = find_device(kind, launch.device_index).memory_bytes()
        there = found and found[1]
    text = f"memory: at least {bytes_text(needed)} per rank"
    if there is None:
        return CheckLine.ok(f"{text}; --device-memory 80GiB compares it with that of a device")
    text += f" of {bytes_text(there)}, {where}"
    if needed > there:
        return CheckLine.failed(text, "use more ranks, resources.update.shard, lora or a smaller model")
    return CheckLine.ok(text)


def _verdict(
    checked: CheckedRun, prepared: Prepared, launch: LaunchEnvironment, failed: list[str], figures: list[CheckLine]
) -> Iterator[str]:
    """Yield the verdict with its main figures, the faults, and the first row."""
    verdict = f"no: {len(failed)} problem{'s'[: len(failed) > 1]}" if failed else "yes"
    size = f"{launch.world_size} rank{'s'[: launch.world_size > 1]}"
    if prepared.train_prompts is not None:
        epochs = checked.num_steps * checked.rows_per_step / len(prepared.prompts)
        size += f" | {checked.num_steps} steps = {epochs:.3g} epochs of {len(prepared.prompts)} rows"
    yield f"would start: {verdict} | {checked.verb} | {size}"
    yield from (f"  {line.text}" for line in figures if line.passed and line.text.startswith(("memory", "disk")))
    yield from (f"FAILED {text}" for text in failed)
    yield from (f"NOTE   {text}" for text in data_warnings(checked, prepared))
    yield from row_lines(checked, prepared)


def _changed(loaded: LoadedConfig[Config]) -> Iterator[str]:
    """Yield the settings that aren't defaults."""
    values = dict(value_leaves(loaded.value))
    changed = {key: origin for key, origin in loaded.origin.items() if origin != DEFAULT}
    yield "settings:"
    yield from (f"    {key}: {shortened(inline(values[key]))}  # {origin}" for key, origin in changed.items())
    yield f"    and {len(values) - len(changed)} defaults; --all prints them"


def _layouts(checked: CheckedRun, launch: LaunchEnvironment) -> Iterator[str]:
    generation = checked.config.resources.generation
    if checked.train_rows:
        yield f"update layout: {checked.layout}"
        yield from (f"{role.name} layout: {layout}" for role, layout in checked.own_layouts.items())
    updating, generating = checked.sets_of(launch.world_size)
    yield f"generation layout: {generation}, replicas: {len(generating) // generation.tensor}"
    if updating != generating:
        yield f"ranks that train: {len(updating)}; ranks that generate: {len(generating)}"
    folder = checked.config.run.folder
    if split := split_line(folder, len(updating), len(generating), are_apart=updating != generating):
        yield f"by the steps in {folder}: {split}"
    if checked.verb == "train":
        yield "schedule: worker state (model; phase): columns read -> made"
        yield from (f"    {slot}" for slot in checked.slots)
    yield from (source.summary for source in (*checked.train_rows, *checked.eval_rows) if source.found)
    if launch.world_size > 1:
        yield f"ranks: {launch.world_size} on {launch.num_nodes} nodes; their devices weren't looked at"


_WIDTH = 76
_MOST_LINES = 8


def data_warnings(checked: CheckedRun, prepared: Prepared) -> Iterator[str]:
    """Yield warnings about data that a run may use in an unintended way."""
    if columns := unread_columns(checked):
        yield f"columns that nothing reads: {', '.join(columns)}"
    prompts = [one for one in (prepared.train_prompts, prepared.held_out) if one is not None]
    yield from (warning.removeprefix("WARNING: ") for warning in prepared.warnings)
    if checked.verb not in ON_PAIRS and (gaps := prepared.vocabulary_gaps):
        yield gaps
    if unknown := unknown_characters(prompts, prepared.tokenizer):
        shown = "".join(sorted(unknown)[:5])
        yield f"the tokenizer has no tokens for {len(unknown)} characters of the prompts, such as {shown!r}"


def unknown_characters(sources: list[PromptSource], tokenizer: ModelTokenizer) -> set[str]:
    """Return the printable characters of prompts that become the unknown token, or nothing."""
    letters: set[str] = set()
    for source in sources:
        letters.update(*source.texts())
    unknown = tokenizer.raw.unk_token_id
    # One by one: a word that lacks a token may hold characters that have one.
    spelt = {letter: tokenizer.encode(letter) for letter in letters if letter.isprintable() and not letter.isspace()}
    return {letter for letter, ids in spelt.items() if not ids or (unknown is not None and unknown in ids)}


def row_lines(checked: CheckedRun, prepared: Prepared) -> Iterator[str]:
    """Yield the first row in the order of the files."""
    prompts = prepared.held_out if prepared.train_prompts is None else prepared.train_prompts
    assert prompts is not None, "every verb reads rows"
    prompt = next(prompts.all())
    yield f"the first row, {prompt.id}: a prompt of {len(prompt.prompt_ids)} tokens"
    yield from _cut(prepared.tokenizer.decode_all(prompt.prompt_ids))
    answers = {"answer": prompt.answer}
    if names := ("learnt",) if checked.verb == "sft" else ("chosen", "rejected") if checked.verb in ON_PAIRS else ():
        rows = LearntRows(prepared.renderer, checked.config.sft.turns if checked.verb == "sft" else "last").of(prompt)
        # With the end of turn that the template writes: it is trained on, too.
        ids = [[one for one, is_learnt in zip(row.ids, row.is_learnt, strict=True) if is_learnt] for row in rows]
        answers = dict(zip(names, map(prepared.tokenizer.decode_all, ids), strict=True))
    for name, text in answers.items():
        first, *more = _cut(text or "none")
        yield f"{name}: {first.strip()}{' ...' if more else ''}"
    for function, parameters in checked.columns_taken.items():
        taken = [name.removesuffix("=") for name in parameters]
        there = [name for name in prompt.columns if name in taken or "**" in taken]
        yield f"columns for {function}: {', '.join(there) or 'none'}"
    if checked.environment is not None and checked.environment.tools:
        yield f"tools of {checked.config.environment.key}: {', '.join(map(name_of_tool, checked.environment.tools))}"


def _cut(text: str) -> list[str]:
    """Return the text in lines, without the middle of a long one."""
    lines = [part for line in text.splitlines() or [text] for part in textwrap.wrap(line, _WIDTH) or [""]] or [""]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - _MOST_LINES} lines ...", *lines[-half:]]
    return [f"    {line}" for line in lines]

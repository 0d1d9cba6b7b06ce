"""The first row as the model and the reward functions read it, and what they don't read of the data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from spmdrl.dataflow.data.learnt_rows import LearntRows
from spmdrl.dataflow.data.prompts import PromptSource
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.job.start.prepared import Prepared
from spmdrl.job.start.start_checks import ON_PAIRS, CheckedRun, unread_columns

_WIDTH = 76
_MOST_LINES = 8


def data_warnings(checked: CheckedRun, prepared: Prepared) -> Iterator[str]:
    """Warnings about data that a run may use otherwise than it was meant."""
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
    """The printable characters of prompts that become the unknown token, or nothing."""
    letters: set[str] = set()
    for source in sources:
        letters.update(*(prompt.text for prompt in source.all()))
    unknown = tokenizer.raw.unk_token_id
    # One by one: a word that lacks a token may hold characters that have one.
    spelt = {letter: tokenizer.encode(letter) for letter in letters if letter.isprintable() and not letter.isspace()}
    return {letter for letter, ids in spelt.items() if not ids or (unknown is not None and unknown in ids)}


def row_lines(checked: CheckedRun, prepared: Prepared) -> Iterator[str]:
    """The first row in the order of the files."""
    prompts = prepared.held_out if prepared.train_prompts is None else prepared.train_prompts
    assert prompts is not None, "every verb reads rows"
    prompt = next(prompts.all())
    yield f"the first row, {prompt.id}: a prompt of {len(prompt.prompt_ids)} tokens"
    yield from _cut(prepared.tokenizer.decode_all(prompt.prompt_ids))
    answers = {"answer": prompt.answer}
    if names := ("learnt",) if checked.verb == "sft" else ("chosen", "rejected") if checked.verb in ON_PAIRS else ():
        rows = LearntRows(prepared.renderer, checked.config.sft.turns if checked.verb == "sft" else "last").of(prompt)
        # With the end of turn that the template writes: it is learnt too.
        ids = [[one for one, is_learnt in zip(row.ids, row.is_learnt, strict=True) if is_learnt] for row in rows]
        answers = dict(zip(names, map(prepared.tokenizer.decode_all, ids), strict=True))
    for name, text in answers.items():
        first, *more = _cut(text or "none")
        yield f"{name}: {first.strip()}{' ...' if more else ''}"
    for function, parameters in checked.columns_taken.items():
        taken = [name.removesuffix("=") for name in parameters]
        there = [name for name in prompt.columns if name in taken or "**" in taken]
        yield f"columns for {function}: {', '.join(there) or 'none'}"


def _cut(text: str) -> list[str]:
    """The text in lines, the middle of a long one left out."""
    lines = [part for line in text.splitlines() or [text] for part in textwrap.wrap(line, _WIDTH) or [""]] or [""]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - _MOST_LINES} lines ...", *lines[-half:]]
    return [f"    {line}" for line in lines]

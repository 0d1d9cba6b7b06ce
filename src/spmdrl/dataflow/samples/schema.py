"""Columns of a sample, the worker states that make them, and their inputs.

A row is one response: row = prompt * N + k, so the prompt (the group) of a row is row // N.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from spmdrl.nouns.batch import Batch, Column, Integers, WorkerState
from spmdrl.nouns.settings.role_configs import END_VALUE, JUDGE_PART, MODEL_PART
from spmdrl.observability.terminal.spelling import unknown


@dataclass(frozen=True)
class ColumnRule:
    """A column, the state that makes it (None: there from the start), and the columns that this needs."""

    column: Column
    made_by: WorkerState | None
    needs: frozenset[str] = frozenset()
    length_of: str | None = None
    """Ragged column with the same row lengths, announced once for both; None: its own."""
    is_always_made: bool = True
    """True if every run with the state has the column."""

    @property
    def name(self) -> str:
        return self.column.name


def _rule(
    name: str,
    dtype: torch.dtype,
    made_by: WorkerState | None,
    needs: str = "",
    *,
    ragged: bool = False,
    length_of: str | None = None,
) -> ColumnRule:
    return ColumnRule(Column(name, dtype, ragged), made_by, frozenset(needs.split()), length_of)


def _per_response_token(name: str, dtype: torch.dtype, made_by: WorkerState, needs: str) -> ColumnRule:
    return _rule(name, dtype, made_by, needs, ragged=True, length_of="response_ids")


_TOKENS = "prompt_ids response_ids"
COPIES = "copies"
MODEL_SCORE = "model_score"
JUDGE_SCORE = "judge_score"
SCORE_COLUMNS = {MODEL_PART: MODEL_SCORE, JUDGE_PART: JUDGE_SCORE}
"""of the parts of the reward that no function gives"""

# Token ids are int32, half the bytes of what engines index with: no vocabulary has 2^31 tokens.
RULES: tuple[ColumnRule, ...] = (
    _rule("prompt_ids", torch.int32, None, ragged=True),
    _rule("response_ids", torch.int32, WorkerState.GENERATION, "prompt_ids", ragged=True),
    _per_response_token("rollout_logprobs", torch.float32, WorkerState.GENERATION, "prompt_ids"),
    _per_response_token("versions", torch.int32, WorkerState.GENERATION, "prompt_ids"),
    # 1: the response ended with a stop token; 0: it was cut at the length limit.
    _rule("finished", torch.int32, WorkerState.GENERATION, "prompt_ids"),
    # Experts of each token but the row's last in each sparse layer; only if routing is replayed.
    replace(
        _rule("routed_experts", torch.int16, WorkerState.GENERATION, "prompt_ids", ragged=True), is_always_made=False
    ),
    _rule("reward", torch.float32, WorkerState.REWARD, _TOKENS),
    _rule("reward_verdict", torch.int32, WorkerState.REWARD, _TOKENS),
    # One value per part of the reward, in the order of `RewardConfig.names`.
    _rule("reward_parts", torch.float32, WorkerState.REWARD, _TOKENS, ragged=True),
    _per_response_token("ref_logprobs", torch.float32, WorkerState.REFERENCE, _TOKENS),
    _per_response_token("old_logprobs", torch.float32, WorkerState.OLD_LOGPROBS, _TOKENS),
    _per_response_token("advantages", torch.float32, WorkerState.ADVANTAGE, "reward response_ids"),
    # Number of times that a row is trained on, if the algorithm draws rows with replacement.
    replace(_rule(COPIES, torch.int32, WorkerState.ADVANTAGE, "reward response_ids"), is_always_made=False),
    _per_response_token("values", torch.float32, WorkerState.VALUES, _TOKENS),
    # Value of the state after a cut response, 0 after others; with critic.truncation bootstrap.
    replace(_rule(END_VALUE, torch.float32, WorkerState.VALUES, _TOKENS), is_always_made=False),
    _per_response_token("returns", torch.float32, WorkerState.RETURNS, "reward response_ids"),
    # Turn in which the model wrote a token, from 1; 0 for the environment's tokens, -1 for its first of a piece; only
    # with an environment.
    replace(_per_response_token("turns", torch.int16, WorkerState.GENERATION, "prompt_ids"), is_always_made=False),
    # The environment's reward of a turn at its last token, 0 at others; only with an environment.
    replace(
        _per_response_token("turn_rewards", torch.float32, WorkerState.GENERATION, "prompt_ids"), is_always_made=False
    ),
    _per_response_token("teacher_logprobs", torch.float32, WorkerState.TEACHER, _TOKENS),
    # The teacher's likeliest tokens in each response token's place, in order.
    replace(_rule("teacher_top_ids", torch.int32, WorkerState.TEACHER_TOP, _TOKENS, ragged=True), is_always_made=False),
    _rule("teacher_top_logprobs", torch.float32, WorkerState.TEACHER_TOP, _TOKENS, ragged=True),
    # Score of the whole response, at its last token.
    _rule(MODEL_SCORE, torch.float32, WorkerState.REWARD_MODEL, _TOKENS),
    # NaN if the judge's verdict has no number.
    _rule(JUDGE_SCORE, torch.float32, WorkerState.JUDGE, _TOKENS),
)

PROMPT_COLUMNS = frozenset(rule.name for rule in RULES if rule.made_by is None)

_NUMBERS: Mapping[str, int] = {rule.name: number for number, rule in enumerate(RULES)}
_RULES: Mapping[str, ColumnRule] = {rule.name: rule for rule in RULES}

LENGTHS_OF: Mapping[str, str | None] = {
    rule.name: (rule.length_of or rule.name) if rule.column.ragged else None for rule in RULES
}
"""Column under which each column's row lengths are announced; None for a dense column."""


def column_number(name: str) -> int:
    """Return the column's position in the schema, which is its bit in metadata and its name on the wire."""
    if name not in _NUMBERS:
        raise ValueError(unknown("no worker state makes column", name, sorted(_NUMBERS)))
    return _NUMBERS[name]


def rule_of(name: str) -> ColumnRule:
    return _RULES[name] if name in _RULES else RULES[column_number(name)]


def column_of(state: WorkerState) -> str:
    """Return the one column that `state` always makes."""
    (name,) = (rule.name for rule in RULES if rule.made_by is state and rule.is_always_made)
    return name


def length_column(name: str) -> str:
    """Return the column under which the row lengths of the ragged column `name` are announced."""
    lengths = LENGTHS_OF[rule_of(name).name]
    assert lengths is not None, f"{name} is a dense column and has no row lengths"
    return lengths


def columns_mask(names: Iterable[str]) -> int:
    """Return the named columns as bits of one integer."""
    mask = 0
    for name in names:
        mask |= 1 << column_number(name)
    return mask


@functools.lru_cache
def mask_of(names: frozenset[str] | tuple[str, ...]) -> int:
    """Return `columns_mask`, cached for repeated names."""
    return columns_mask(names)


def names_of_mask(mask: int) -> list[str]:
    """Return the column names of a mask, in schema order."""
    return [rule.name for number, rule in enumerate(RULES) if mask >> number & 1]


def check_columns(batch: Batch, state: WorkerState) -> None:
    """Refuse columns that `state` doesn't make, or whose kind, dtype or lengths break the schema."""
    for column in _columns_made(state, tuple(batch.columns)):
        tensor = batch.columns[column.name]
        fits = tensor.dtype == column.dtype and batch.is_ragged(column.name) == column.ragged
        if not fits or tensor.is_meta or tensor.layout != torch.strided:
            check_column(batch, column.name)


@functools.lru_cache
def _columns_made(state: WorkerState, names: tuple[str, ...]) -> tuple[Column, ...]:
    """Return the columns of these names. Raises ValueError for one that `state` doesn't make."""
    for name in sorted(names):
        maker = rule_of(name).made_by
        if maker is not state:
            owner = maker.value if maker else "the prompts"
            raise ValueError(f"{state.value} puts column {name!r}, which only {owner} may make")
    return tuple(rule_of(name).column for name in sorted(names))


def check_column(batch: Batch, name: str) -> None:
    column, tensor, is_ragged = rule_of(name).column, batch.columns[name], batch.is_ragged(name)
    if is_ragged != column.ragged or tensor.dtype != column.dtype:
        kinds = {True: "ragged", False: "dense"}
        raise ValueError(
            f"column {name!r} is {kinds[is_ragged]} {tensor.dtype}, but the schema says "
            f"{kinds[column.ragged]} {column.dtype}; convert it before putting it"
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        raise ValueError(
            f"column {name!r} is a {tensor.layout} tensor on {tensor.device}, but the host keeps strided tensors with "
            "values; convert it before putting it"
        )


def check_row_lengths(batch: Batch, known_lengths: Callable[[str, Integers], Integers]) -> None:
    """Refuse a column whose row lengths differ from its `length_of` column's.

    `known_lengths` returns lengths of rows in a column outside the batch, 0 if it doesn't exist.
    """
    rows = batch.rows.numpy()
    for name in batch.names:
        other = LENGTHS_OF[name]
        if other is None or other == name:
            continue
        offsets, others = batch.offsets(name), batch.offsets(other) if other in batch else None
        if offsets is others:
            continue
        bounds = offsets.numpy()
        if others is not None and bounds.tobytes() == others.numpy().tobytes():
            continue
        lengths = bounds[1:] - bounds[:-1]
        expected = known_lengths(other, rows) if others is None else np.diff(others.numpy())
        differs = lengths != expected
        if np.count_nonzero(differs):
            at = int(differs.argmax())
            raise ValueError(
                f"column {name!r} has {lengths[at]} values in row {rows[at]}, but {other!r} has {expected[at]}; put "
                "one value for each of its tokens"
            )


def empty_batch(names: Iterable[str]) -> Batch:
    """Return a batch of no rows with the named columns."""
    batch = Batch.of_rows([])
    for name in names:
        column = rule_of(name).column
        if column.ragged:
            batch.put_lists(name, [], column.dtype)
        else:
            batch.put_dense(name, torch.empty(0, dtype=column.dtype))
    return batch


def stages_for(
    columns_read: Iterable[str],
    *,
    rules: Iterable[ColumnRule] = RULES,
    extra_reads: Mapping[WorkerState, Iterable[str]] | None = None,
) -> tuple[WorkerState, ...]:
    """Return the worker states that make these columns and all that they depend on, makers before readers.

    Among states that may run in any order, the order of `WorkerState` decides. `extra_reads` are columns that
    a state reads beyond the schema (an advantage with KL in the reward reads `ref_logprobs`). Raises ValueError for a
    column that no state makes, and for states that wait for each other.
    """
    by_name = {rule.name: rule for rule in rules}
    pending = _makers_needed(set(columns_read), by_name, extra_reads or {})
    order: list[WorkerState] = []
    while pending:
        free = [state for state in WorkerState if state in pending and not pending[state] & pending.keys()]
        if not free:
            raise ValueError(_cycle(pending))
        order.append(free[0])
        del pending[free[0]]
    return tuple(order)


def needs_by_state(
    columns_read: Iterable[str],
    extra_reads: Mapping[WorkerState, Iterable[str]] | None = None,
    *,
    also_trained: Mapping[WorkerState, Iterable[str]] | None = None,
) -> dict[WorkerState, frozenset[str]]:
    """Return each state's inputs: the stages' own needs, and for the update the tokens and `columns_read`.

    `also_trained` has the inputs of other models' updates, which run before the policy's.
    """
    tokens, extra = frozenset(_TOKENS.split()), extra_reads or {}
    trained = {state: tokens | set(names) for state, names in (also_trained or {}).items()}
    trained[WorkerState.UPDATE] = tokens | set(columns_read)
    needs = {}
    for state in stages_for(frozenset().union(*trained.values()), extra_reads=extra):
        own = [rule.needs for rule in RULES if rule.made_by is state]
        needs[state] = frozenset().union(*own, extra.get(state, ()))
    return needs | trained


def _makers_needed(
    columns: set[str], by_name: Mapping[str, ColumnRule], extra_reads: Mapping[WorkerState, Iterable[str]]
) -> dict[WorkerState, set[WorkerState]]:
    """Return each state needed for `columns`, with the states that it waits for."""
    makers: dict[WorkerState, set[WorkerState]] = {}
    todo, seen = sorted(columns), set(columns)
    while todo:
        rule = _known(todo.pop(), by_name)
        state = rule.made_by
        if state is None:
            continue
        reads = rule.needs | frozenset(extra_reads.get(state, ()))
        waits_for = makers.setdefault(state, set())
        for name in sorted(reads):
            maker = _known(name, by_name).made_by
            if maker is not None:
                waits_for.add(maker)
        todo.extend(sorted(reads - seen))
        seen |= reads
    return makers


def _known(name: str, by_name: Mapping[str, ColumnRule]) -> ColumnRule:
    if name not in by_name:
        raise ValueError(unknown("no worker state makes column", name, sorted(by_name)))
    return by_name[name]


def _cycle(pending: Mapping[WorkerState, set[WorkerState]]) -> str:
    """Follow one unmet dependency after another until a state comes back."""
    state, path = next(iter(pending)), []
    while state not in path:
        path.append(state)
        state = min(pending[state] & pending.keys(), key=lambda other: other.value)
    circle = [*path[path.index(state) :], state]
    names = " -> ".join(member.value for member in circle)
    return f"worker states wait for each other: {names}; one of them must stop reading what the next one makes"

"""The worker states of a step as data: their order and, for each, its model, its columns and its phase.

generation | without the actor | with the actor | update
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from spmdrl.dataflow.samples.schema import RULES, rule_of
from spmdrl.nouns.roles import Role, WorkerState


class Phase(enum.IntEnum):
    """A part of a step; the actor's weights change hands between two of them."""

    GENERATION = 0
    WITHOUT_ACTOR = 1
    """the actor's training state returns during it"""
    WITH_ACTOR = 2
    UPDATE = 3
    """rewards are known"""


@dataclass(frozen=True)
class Slot:
    """The turn of one worker state."""

    state: WorkerState
    role: Role | None
    """model that must be present"""
    phase: Phase
    reads: frozenset[str]
    makes: tuple[str, ...]
    beside: WorkerState | None = None
    """state during whose turn this one's work is done or started; its own turn does the rest"""

    def __str__(self) -> str:
        model = self.role.name if self.role else "no model"
        place = self.phase.name.lower().replace("_", " ") + (f", beside {self.beside.value}" if self.beside else "")
        made = ", ".join(self.makes) or f"weights of the {model}"
        return f"{self.state.value} ({model}; {place}): {', '.join(sorted(self.reads))} -> {made}"


def schedule(
    needs: Mapping[WorkerState, frozenset[str]], roles: Mapping[WorkerState, Role | None], *,
    fuse: bool, refills: bool, has_turns: bool, apart: bool = False,
) -> list[Slot]:  # fmt: skip
    """Order the states that read `needs`: by phase, and within one by the availability of their columns.

    With `fuse`, the state that waits for rewards comes last in its phase, so that every pass before it hides their
    seconds; otherwise as soon as possible. With `refills` it is a part of generation, whose prompts depend on rewards,
    and with `apart`, as it is of the ranks that generate while others train. With `has_turns`, models score rows that
    have ended while others wait for an environment.
    """
    read = frozenset[str]().union(*needs.values())

    def phase_of(state: WorkerState) -> Phase:
        role = roles[state]
        if state.work == "train" or state in (WorkerState.RETURNS, WorkerState.ADVANTAGE):
            return Phase.UPDATE
        if state is WorkerState.GENERATION or (state is WorkerState.REWARD and (refills or apart)):
            return Phase.GENERATION
        with_actor = fuse if state is WorkerState.REWARD else role is not None and role.presence == "training"
        return Phase.WITH_ACTOR if with_actor else Phase.WITHOUT_ACTOR

    def beside(state: WorkerState) -> WorkerState | None:
        in_portions = has_turns and fuse and not refills and not apart
        is_overlapped = state is WorkerState.REWARD or (state.work == "score" and in_portions)
        return WorkerState.GENERATION if is_overlapped else None

    waiting = {
        state: Slot(
            state, roles[state], phase_of(state), reads,
            tuple(rule.name for rule in RULES if rule.made_by is state and (rule.is_always_made or rule.name in read)),
            beside(state),
        )
        for state, reads in needs.items()
    }  # fmt: skip
    slots: list[Slot] = []
    while waiting:
        ready = [slot for slot in waiting.values() if not any(rule_of(name).made_by in waiting for name in slot.reads)]
        slots.append(min(ready, key=lambda slot: (slot.phase, fuse or slot.state is not WorkerState.REWARD)))
        del waiting[slots[-1].state]
    return slots

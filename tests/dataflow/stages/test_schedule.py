"""The order of a step's worker states follows from their columns, their models and what is fused."""

from __future__ import annotations

from itertools import product

import pytest

from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.dataflow.stages.schedule import Phase, Slot, schedule
from spmdrl.nouns.roles import POLICY, WorkerState

ALL = {
    WorkerState.REWARD: {"model_score", "judge_score"},
    WorkerState.ADVANTAGE: {"ref_logprobs", "teacher_logprobs", "values", "returns"},
    WorkerState.RETURNS: {"values"},
}
OF_CRITIC = {WorkerState.CRITIC_UPDATE: {"values", "returns", "advantages"}}


def scheduled(
    reads=("old_logprobs", "advantages"), extra=ALL, *, fuse=True, refills=False, has_turns=False, lora=False
) -> list[Slot]:
    needs = needs_by_state(reads, extra, also_trained=OF_CRITIC if extra is ALL else {})
    roles = {state: POLICY if lora and state is WorkerState.REFERENCE else state.role for state in needs}
    return schedule(needs, roles, fuse=fuse, refills=refills, has_turns=has_turns)


def names(slots: list[Slot], phase: Phase) -> list[str]:
    return [slot.state.value for slot in slots if slot.phase is phase]


@pytest.mark.parametrize(("fuse", "refills", "has_turns", "lora"), [*product((False, True), repeat=4)])
def test_every_column_is_made_before_it_is_read_and_phases_only_go_on(fuse, refills, has_turns, lora):
    extra = {WorkerState.ADVANTAGE: {"ref_logprobs"}} if refills else ALL
    slots = scheduled(extra=extra, fuse=fuse, refills=refills, has_turns=has_turns, lora=lora)
    there = {"prompt_ids"}
    for slot in slots:
        assert slot.reads <= there, slot
        there |= {*slot.makes}
    assert [slot.phase for slot in slots] == sorted(slot.phase for slot in slots)


def test_rewards_are_waited_for_behind_every_pass_that_can_hide_them():
    slots = scheduled()
    assert names(slots, Phase.WITHOUT_ACTOR) == ["reward_model", "judge", "reference", "teacher"]
    assert names(slots, Phase.WITH_ACTOR) == ["old_logprobs", "values", "reward"]
    assert names(slots, Phase.UPDATE) == ["returns", "advantage", "critic_update", "update"]


def test_without_fusing_rewards_are_waited_for_as_soon_as_their_scores_are_there():
    slots = scheduled(fuse=False)
    assert names(slots, Phase.WITHOUT_ACTOR) == ["reward_model", "judge", "reward", "reference", "teacher"]
    assert names(slots, Phase.WITH_ACTOR) == ["old_logprobs", "values"]


def test_where_prompts_depend_on_rewards_these_are_a_part_of_generation():
    assert names(scheduled(extra={}, refills=True), Phase.GENERATION) == ["generation", "reward"]


def test_a_reference_without_adapters_is_scored_with_the_policy_there():
    slots = {slot.state: slot for slot in scheduled(lora=True, has_turns=True)}
    assert slots[WorkerState.REFERENCE].phase is Phase.WITH_ACTOR
    assert slots[WorkerState.VALUES].beside is WorkerState.GENERATION


def test_a_column_that_few_runs_have_is_made_where_it_is_read():
    assert "end_value" not in next(slot.makes for slot in scheduled() if slot.state is WorkerState.VALUES)
    extra = {**ALL, WorkerState.RETURNS: {"values", "end_value"}}
    assert "end_value" in next(slot.makes for slot in scheduled(extra=extra) if slot.state is WorkerState.VALUES)

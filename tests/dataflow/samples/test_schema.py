from __future__ import annotations

import pytest
import torch

from spmdrl.dataflow.samples.schema import (
    RULES,
    ColumnRule,
    check_columns,
    columns_mask,
    names_of_mask,
    needs_by_state,
    stages_for,
)
from spmdrl.nouns.batch import Batch, Column, WorkerState


def test_stages_come_after_the_stages_that_they_read_from():
    stages = stages_for({"advantages", "ref_logprobs", "old_logprobs"})
    assert stages == (
        WorkerState.GENERATION,
        WorkerState.REFERENCE,
        WorkerState.OLD_LOGPROBS,
        WorkerState.REWARD,
        WorkerState.ADVANTAGE,
    )


def test_a_stage_that_nothing_reads_is_left_out():
    assert WorkerState.REFERENCE not in stages_for({"advantages"})
    assert stages_for({"prompt_ids"}) == ()


def test_an_extra_read_brings_its_maker_along():
    extra = {WorkerState.ADVANTAGE: {"ref_logprobs"}}
    stages = stages_for({"advantages"}, extra_reads=extra)
    assert stages.index(WorkerState.REFERENCE) < stages.index(WorkerState.ADVANTAGE)
    assert "ref_logprobs" in needs_by_state({"advantages"}, extra)[WorkerState.ADVANTAGE]


def test_the_update_always_waits_for_the_tokens():
    assert needs_by_state({"advantages"})[WorkerState.UPDATE] == {"advantages", "prompt_ids", "response_ids"}


def test_an_unknown_column_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="'advantage'; did you mean 'advantages'"):
        stages_for({"advantage"})
    with pytest.raises(ValueError, match="did you mean 'ref_logprobs'"):
        stages_for({"advantages"}, extra_reads={WorkerState.ADVANTAGE: {"ref_logprob"}})


def test_states_that_wait_for_each_other_are_refused_with_the_circle():
    def rule(name: str, state: WorkerState, needs: str) -> ColumnRule:
        return ColumnRule(Column(name, torch.float32), state, frozenset({needs}))

    rules = (
        rule("a", WorkerState.REWARD, "b"),
        rule("b", WorkerState.REFERENCE, "a"),
        rule("c", WorkerState.ADVANTAGE, "a"),
    )
    with pytest.raises(ValueError, match="reward -> reference -> reward"):
        stages_for({"c"}, rules=rules)


def test_masks_hold_each_column_once():
    names = [rule.name for rule in RULES]
    assert names_of_mask(columns_mask(names)) == names
    assert names_of_mask(columns_mask(["reward"])) == ["reward"]


def test_columns_of_another_state_or_dtype_are_refused():
    batch = Batch.of_rows([0])
    batch.put_dense("reward", torch.zeros(1))
    check_columns(batch, WorkerState.REWARD)
    with pytest.raises(ValueError, match="only reward may make"):
        check_columns(batch, WorkerState.GENERATION)
    batch.put_dense("reward", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="convert it"):
        check_columns(batch, WorkerState.REWARD)

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.generation.replay import ReplayEngine, record_rollouts, rollout_file
from spmdrl.nouns.settings.rollout_config import SamplingParams

RESPONSES = [
    Response(4, (5, 6, 7), (-0.1, -0.25, -1 / 3), "stop", (2, 2, 3)),
    Response(5, (8,), (-1e-9,), "length", (2,)),
    Response(6, (), (), "aborted", ()),
]
PROMPTS = {4: (1, 2), 5: (1, 2), 6: (3,)}


def ask(prompt: tuple[int, ...], *rows: int) -> Request:
    return Request(rows, prompt, rows, SamplingParams())


def replay_of(folder: Path) -> ReplayEngine:
    record_rollouts(rollout_file(folder, 7), RESPONSES, PROMPTS)
    engine = ReplayEngine(folder)
    engine.begin_step(7)
    return engine


def run(engine: ReplayEngine, requests: Sequence[Request]) -> dict[int, Response]:
    engine.submit(requests)
    responses = {response.row: response for response in engine.step()}
    assert not engine.has_work
    return responses


def test_replay_returns_what_was_recorded(tmp_path: Path):
    engine = replay_of(tmp_path)
    responses = run(engine, [ask((3,), 6), ask((1, 2), 5, 4)])
    assert responses == {response.row: response for response in RESPONSES}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007.part_00000.safetensors"]


def test_replay_refuses_another_prompt_and_an_unknown_row(tmp_path: Path):
    engine = replay_of(tmp_path)
    with pytest.raises(ValueError, match=r"row 4 of step 7 was recorded for another prompt, \[1, 2\]"):
        engine.submit([ask((1, 3), 4)])
    with pytest.raises(ValueError, match="row 9 isn't among the 3 rows recorded for step 7"):
        engine.submit([ask((1, 2), 9)])


def test_ranks_may_record_parts_of_a_step(tmp_path: Path):
    for part, response in enumerate(RESPONSES):
        record_rollouts(rollout_file(tmp_path, 0, part), [response], PROMPTS)
    engine = ReplayEngine(tmp_path)
    engine.begin_step(0)
    assert run(engine, [ask((1, 2), 4, 5)]) == {4: RESPONSES[0], 5: RESPONSES[1]}
    record_rollouts(rollout_file(tmp_path, 0, 9), RESPONSES[:1], PROMPTS)
    with pytest.raises(ValueError, match="row 4 of step 0 is in .*part_00009"):
        engine.begin_step(0)


def test_a_step_without_rollouts_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no rollouts of step 3"):
        ReplayEngine(tmp_path).begin_step(3)


def test_abort_forgets_what_was_asked(tmp_path: Path):
    engine = replay_of(tmp_path)
    engine.submit([ask((1, 2), 4)])
    assert [response.finish for response in engine.abort()] == ["aborted"]
    assert not engine.has_work

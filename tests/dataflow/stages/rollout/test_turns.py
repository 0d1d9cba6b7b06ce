"""Rows that take turns with an environment: the same whoever runs beside them, and wherever they are stopped."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.engines.generation.support import TINY, make_engine, prompt_of, small_rollout
from tests.support.chosen_device import chosen_device

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.rollout.partial import OwnGroup, nothing_yet, packed, unpacked
from spmdrl.dataflow.stages.rollout.requests import run_requests
from spmdrl.dataflow.stages.rollout.turn_row import TurnRow
from spmdrl.dataflow.stages.rollout.turns import RolloutTurns
from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.episode import Observation, TurnParts
from spmdrl.engines.environment.journal import Journal
from spmdrl.engines.generation.native.native_engine import Lockstep, NativeEngine
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.generation.replay import ReplayEngine, read_rollouts, record_rollouts, rollout_file
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.resources.mesh import lone_generation_mesh
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.workers.verdict import Verdict

FILE = Path(__file__).with_name("environments.py")
LETTERS = "".join(map(chr, range(97, 97 + TINY.vocab_size)))
SAMPLING = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(20, 28)), stop_strings=(LETTERS[30], LETTERS[31]))
NUM_GROUPS, SIZE = 4, 3


def decode(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in token_ids)


def encode(row: TurnRow, read: Observation) -> tuple[list[int], bool]:
    return [LETTERS.index(letter) for letter in read.before + read.text + read.after], False


def engine_of(**rollout: object) -> NativeEngine:
    engine = make_engine(small_rollout(**rollout), decode=decode)
    weights = RandomWeights(TINY, 0)
    engine.load_weights((name, 4 * weights(name)) for name in engine.weight_shapes())
    engine.wake_cache()
    return engine


@pytest.fixture
def pool():
    with EnvironmentPool(EnvironmentConfig(f"{FILE}:Answering", isolation="inline")) as pool:
        yield pool


def turns_of(pool: EnvironmentPool, return_after: int = 2, vocab_size: int = TINY.vocab_size) -> RolloutTurns:
    mesh = lone_generation_mesh()
    lockstep = Lockstep(mesh.expert, chosen_device())
    return RolloutTurns(
        pool, mesh, lockstep=lockstep, decode=decode, decode_all=decode, read=lambda *_: TurnParts(), encode=encode,
        vocab_size=vocab_size, return_after=return_after, has_openings=False,
    )  # fmt: skip


def group(number: int, begun: tuple[Response, ...] | None = None) -> OwnGroup:
    rows = tuple(range(number * SIZE, (number + 1) * SIZE))
    prompt = Prompt(str(number), prompt_of(3 + 2 * number), "", None, {"answer": None}, f"prompt {number}")
    return OwnGroup(number, 1, prompt, tuple(1000 + row for row in rows), begun or nothing_yet(rows))


def run(turns: RolloutTurns, groups: Sequence[OwnGroup], engine: NativeEngine, most: int | None = None) -> dict:
    """The responses by row; with `most`, the engine stops after so many steps."""
    requests = [(one, one.request(SAMPLING)) for one in groups]
    left = itertools.count(most, -1) if most is not None else itertools.repeat(1)
    asked = [(one, request) for one, request in requests if request is not None]
    answers = turns.run(
        engine, [request for _, request in asked], [one.prompt for one, _ in asked], lambda: next(left) <= 0
    )
    found = {response.row: response for ended in answers for responses in ended.values() for response in responses}
    assert not engine.num_unfinished
    return {response.row: response for one in groups for response in one.begun} | found


def contents(responses: dict[int, Response]) -> dict:
    return {row: (one.token_ids, one.turns, one.turn_rewards, one.finish) for row, one in responses.items()}


def test_rows_are_the_same_however_late_they_come_back_and_whoever_runs_beside_them(pool):
    whole = run(turns_of(pool), [group(number) for number in range(NUM_GROUPS)], engine_of())
    assert {len(one.turns) for one in whole.values()} != {0} and len(whole) == NUM_GROUPS * SIZE
    assert {max(one.turns) for one in whole.values()} >= {1, 3}, "rows must take different numbers of turns"
    assert any(0 in one.turns for one in whole.values()) and {one.finish for one in whole.values()} == {
        "stop",
        "length",
    }
    for return_after in (0, 7):
        again = run(turns_of(pool, return_after), [group(number) for number in range(NUM_GROUPS)], engine_of())
        assert contents(again) == contents(whole)
    alone = {}
    for number in range(NUM_GROUPS):
        alone |= run(turns_of(pool), [group(number)], engine_of(max_running_rows=2))
    assert contents(alone) == contents(whole)


def test_a_turns_reward_is_at_its_last_token(pool):
    found = run(turns_of(pool), [group(number) for number in range(NUM_GROUPS)], engine_of())
    assert sum(max(one.turns) == 3 for one in found.values()) > 2
    for one in found.values():
        ends = {max(place for place, turn in enumerate(one.turns) if turn == number) for number in one.turns if number}
        rewarded = {place: reward for place, reward in enumerate(one.turn_rewards) if reward}
        assert len(one.turn_rewards) == len(one.turns) and rewarded.keys() <= ends
        assert {one.turns[place] for place in rewarded} >= set(range(1, max(one.turns))), "only the last may have none"
        for place, reward in rewarded.items():
            assert reward == one.turns.count(one.turns[place]) / 4


def test_the_same_rows_come_to_the_same_bits(pool):
    groups = [group(number) for number in range(NUM_GROUPS)]
    assert run(turns_of(pool), groups, engine_of()) == run(turns_of(pool), groups, engine_of())


def test_each_token_has_the_log_prob_that_the_model_gives_it_behind_what_it_read(pool):
    groups, engine = [group(number) for number in range(NUM_GROUPS)], engine_of()
    responses = run(turns_of(pool), groups, engine)
    for one in groups:
        for row in one.rows:
            response = responses[row]
            (scored,) = engine.score([[*one.prompt.prompt_ids, *response.token_ids]])
            own = scored[len(one.prompt.prompt_ids) - 1 :].tolist()
            for turn, found, expected in zip(response.turns, response.logprobs, own, strict=True):
                assert found == (pytest.approx(expected, abs=1e-4) if turn else 0.0)


@pytest.mark.parametrize("most", range(0, 30, 3))
def test_rows_stopped_anywhere_go_on_as_if_nothing_had_happened(pool, most):
    groups = [group(number) for number in range(NUM_GROUPS)]
    whole = run(turns_of(pool), groups, engine_of())
    left = run(turns_of(pool), groups, engine_of(), most)
    again = [group(one.serial, unpacked(packed([left[row] for row in one.rows]), one.rows)) for one in groups]
    assert all(one.begun == tuple(left[row] for row in one.rows) for one in again)
    assert contents(run(turns_of(pool), again, engine_of())) == contents(whole)


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_rows_with_sessions_are_the_same_wherever_they_are_stopped(pool, isolation):
    groups = [group(number) for number in range(NUM_GROUPS)]
    whole = contents(run(turns_of(pool), groups, engine_of()))
    with EnvironmentPool(EnvironmentConfig(f"{FILE}:Remembering", isolation=isolation, workers=2)) as own:
        assert contents(run(turns_of(own), groups, engine_of())) == whole
        for most in (4, 9):
            left = run(turns_of(own), groups, engine_of(), most)
            again = [group(one.serial, unpacked(packed([left[row] for row in one.rows]), one.rows)) for one in groups]
            assert contents(run(turns_of(own), again, engine_of())) == whole
        if isolation == "inline":
            assert sys.modules["spmdrl_file_environments"].Memory.open_ones == 0, "each is closed at its row's end"


@pytest.mark.parametrize("turn", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_turn_that_kills_its_worker_ends_its_row_and_changes_no_other(pool, turn):
    groups = [group(number) for number in range(NUM_GROUPS)]
    whole = run(turns_of(pool), groups, engine_of())
    dying = next(row for row, one in whole.items() if one.finish == "stop" and max(one.turns) == 3)
    for one in groups:
        one.prompt.columns.update(seed=1000 + dying, dies_at=turn)
    with EnvironmentPool(EnvironmentConfig(f"{FILE}:Dying", isolation="process")) as own:
        found = run(turns_of(own), groups, engine_of())
    lost, expected = found.pop(dying), whole.pop(dying)
    assert found == whole, "sessions that lived in the same worker go on elsewhere"
    assert lost.outcome.verdict is Verdict.CRASHED and max(lost.turns) == turn
    assert lost.token_ids == expected.token_ids[: len(lost.token_ids)]


def test_a_run_killed_at_any_call_makes_no_answered_call_again(tmp_path):
    counter = tmp_path / "counter"
    groups = [group(number) for number in range(NUM_GROUPS)]
    for one in groups:
        one.prompt.columns["counter"] = str(counter)

    def attempt(folder: Path, dies_at: int) -> dict | None:
        counter.with_suffix(".dies").write_text(str(dies_at))
        journal = Journal(folder, 0, 0, list)
        config = EnvironmentConfig(f"{FILE}:Numbering", isolation="inline")
        with EnvironmentPool(config, journal=journal) as pool, activity.in_stage("generation", 1):
            try:
                return run(turns_of(pool), groups, engine_of())
            except BaseException as error:
                assert type(error).__name__ == "Killed"
                return None

    counter.write_text("0")
    whole = attempt(tmp_path / "whole", -1)
    num_calls = int(counter.read_text())
    assert num_calls > 20 and len({one.outcome.reward for one in whole.values() if one.outcome}) > 3
    counter.write_text("0")
    for dies_at in sorted(random.Random(0).sample(range(num_calls), 4)):
        assert attempt(tmp_path / "killed", dies_at) is None
        with open(tmp_path / "killed" / "environment" / "000001.0.jsonl", "a") as file:
            file.write('{"call": "cut')
    assert attempt(tmp_path / "killed", -1) == whole and int(counter.read_text()) == num_calls


def test_recorded_rows_hold_their_turns(pool, tmp_path):
    responses = run(turns_of(pool), [group(1)], engine_of())
    record_rollouts(tmp_path / "rows", list(responses.values()), dict.fromkeys(responses, (1, 2)))
    assert {row: one for row, (_, one) in read_rollouts(tmp_path / "rows").items()} == responses


def test_rows_recorded_with_an_environment_are_refused_without_one(pool, tmp_path):
    one = group(1)
    responses = list(run(turns_of(pool), [one], engine_of()).values())
    record_rollouts(rollout_file(tmp_path, 1), responses, dict.fromkeys(one.rows, one.prompt.prompt_ids))
    for has_turns in (True, False):
        engine = ReplayEngine(tmp_path, has_turns=has_turns)
        engine.begin_step(1)
        if has_turns:
            (by_request,) = run_requests(engine, [one.request(SAMPLING)])
            ((number, found),) = by_request.items()
            assert number == 0 and sorted(found, key=lambda each: each.row) == sorted(
                responses, key=lambda each: each.row
            )
        else:
            with pytest.raises(ValueError, match="recorded with an environment; use the environment of"):
                engine.submit([one.request(SAMPLING)])


@pytest.mark.parametrize(
    ("what", "verdict"),
    [("crash", Verdict.CRASHED), ("die", Verdict.CRASHED), ("hang", Verdict.TIMED_OUT),
     ("malformed", Verdict.MALFORMED), ("", None)],
)  # fmt: skip
def test_a_step_ends_its_row_with_a_reward_or_with_what_went_wrong(what, verdict):
    config = EnvironmentConfig(f"{FILE}:Judging", isolation="process", timeout_seconds=1.0)
    one = group(2)
    one.prompt.columns["what"] = what
    with EnvironmentPool(config) as pool:
        responses = run(turns_of(pool), [one], engine_of())
    ended = [response for response in responses.values() if response.finish == "stop"]
    assert ended
    for response in ended:
        text = decode(response.token_ids)
        if verdict is None:
            assert response.outcome.reward == len(text) / 8 and response.end == "ended"
        else:
            assert response.outcome.reward is None and response.outcome.verdict is verdict
            assert response.outcome.error and response.end == verdict.name.lower()
    cut = [response.end for response in responses.values() if response.finish == "length"]
    assert set(cut) <= {"length"}


def test_text_that_the_model_cannot_read_ends_its_row(pool):
    groups = [group(number) for number in range(NUM_GROUPS)]
    known, responses = (run(turns_of(pool, vocab_size=size), groups, engine_of()) for size in (TINY.vocab_size, 4))
    failed = {row for row, one in responses.items() if one.outcome is not None}
    read = {row: max(token for token, turn in zip(one.token_ids, one.turns, strict=True) if not turn)
            for row, one in known.items() if 0 in one.turns}  # fmt: skip
    foreign = {row for row, token in read.items() if token >= 4}
    assert foreign and foreign <= failed and all(known[row].finish == "length" for row in failed - foreign)
    assert all(responses[row].outcome.verdict is Verdict.MALFORMED for row in failed)


def test_an_environment_that_cannot_be_built_is_refused():
    for function, problem in (
        ("calculato", "did you mean 'calculator'"),
        (f"{FILE}:Answerin", "did you mean 'Answering'"),
        (f"{FILE}:Episode", "can't be built"),
        ("missing.py:Some", "there is no file"),
        ("fractions:Fraction", r"has no method step"),
    ):
        for isolation in ("inline", "process"):
            with pytest.raises(ValueError, match=f"environment.function: .*{problem}"):
                EnvironmentPool(EnvironmentConfig(function, isolation=isolation))

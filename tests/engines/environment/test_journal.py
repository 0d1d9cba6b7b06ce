"""Answers are found by step and call until a checkpoint holds their step; failures are asked again."""

from __future__ import annotations

from pathlib import Path

from spmdrl.engines.environment.environment_runner import StepResult
from spmdrl.engines.environment.episode import Observation
from spmdrl.engines.environment.journal import Journal
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.workers.verdict import Verdict

GIVEN = StepResult(observation=Observation("\u00e9", before="[", after="]"))
ENDED = StepResult(reward=0.5)


def answered(journal: Journal, step: int, **results: StepResult) -> None:
    with activity.in_stage("generation", step):
        for name, result in results.items():
            assert journal.find(name, {"prompt": name}) is None
            journal.add(name, result)


def found(journal: Journal, step: int, name: str) -> StepResult | None:
    with activity.in_stage("generation", step):
        return journal.find(name, {"prompt": name})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "environment").glob("*"))


def test_answers_of_all_ranks_are_found_once_in_their_step(tmp_path):
    ranks = [Journal(tmp_path, rank, 0, list) for rank in range(2)]
    answered(ranks[0], 3, a=GIVEN, b=StepResult(verdict=Verdict.CRASHED, error="down"))
    answered(ranks[1], 3, c=ENDED)
    for journal in ranks:
        journal.close()
    resumed = Journal(tmp_path, 0, 2, lambda: [2])
    assert found(resumed, 4, "a") is None, "an evaluation asks the same in several steps"
    assert [found(resumed, 3, name) for name in "abca"] == [GIVEN, None, ENDED, None]


def test_log_probs_of_the_same_tokens_may_differ(tmp_path):
    def asked(logprob: float, token: int = 5) -> dict[str, object]:
        turn = {"token_ids": (token,), "logprobs": (logprob,)}
        return {"prompt": "a", "turns": (turn, turn), **turn}

    with activity.in_stage("generation", 1):
        journal = Journal(tmp_path, 0, 0, list)
        assert journal.find("a", asked(-0.25)) is None
        journal.add("a", GIVEN)
        journal.close()
        resumed = Journal(tmp_path, 0, 0, list)
        assert resumed.find("b", asked(-0.25, token=6)) is None and resumed.find("c", asked(-0.26)) == GIVEN


def test_answers_are_dropped_once_a_checkpoint_has_their_step(tmp_path):
    saved: list[int] = []
    journal = Journal(tmp_path, 0, 0, lambda: saved)
    for step in (1, 2, 3):
        answered(journal, step, a=GIVEN)
    assert names(tmp_path) == ["000001.0.jsonl", "000002.0.jsonl", "000003.0.jsonl"]
    saved.append(2)
    answered(journal, 4, a=ENDED)
    assert names(tmp_path) == ["000003.0.jsonl", "000004.0.jsonl"]
    journal.close()
    assert found(Journal(tmp_path, 0, 3, lambda: [1, 3]), 3, "a") is None
    assert found(Journal(tmp_path, 0, 3, lambda: [1, 3]), 4, "a") == ENDED


def test_half_a_line_costs_its_own_answer_alone(tmp_path):
    journal = Journal(tmp_path, 0, 0, list)
    answered(journal, 1, a=GIVEN, b=ENDED)
    journal.close()
    path = tmp_path / "environment" / "000001.0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    again = Journal(tmp_path, 0, 0, list)
    assert found(again, 1, "a") == GIVEN
    answered(again, 1, b=ENDED)
    again.close()
    last = Journal(tmp_path, 0, 0, list)
    assert [found(last, 1, name) for name in "ab"] == [GIVEN, ENDED]

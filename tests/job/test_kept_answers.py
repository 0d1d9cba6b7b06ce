"""Answers of `generate` survive a kill, and the same command goes on with them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.support.jobs import begin_job, finished, inline_config, run_job
from tests.support.ranks import end, run_ranks

from spmdrl.job.rollouts.kept_answers import FOLDER, KeptAnswers
from spmdrl.resources.world import World

IDENTITY = {"seed": 0, "rollout.temperature": 1.0}
SETTINGS = [
    "data.eval=synthetic://addition?low=0&high=49&count=30&split=test", "eval.num_samples=8",
    "model.make.max_position_embeddings=64", "rollout.max_completion_length=50", "rollout.max_running_rows=16",
    "rollout.ignore_eos=true",
]  # fmt: skip
NUM_ROWS = 30 * 8


def answers_of(*rows: int) -> list[dict]:
    return [{"row": row, "response": f"line\nbreaks \u2028 {row}"} for row in rows]


def keep(world: World, folders: list[Path], rows_by_rank: list[list[int]]) -> list[int]:
    """Add some rows on each rank and stop there, as if killed; returns the rows that were there before."""
    kept = KeptAnswers(folders[world.rank], IDENTITY, world)
    before = kept.rows()
    for row in rows_by_rank[world.rank]:
        kept.add(answers_of(row))
    return sorted(before)


def gather(world: World, folders: list[Path]) -> tuple[list[int], list[str]]:
    kept = KeptAnswers(folders[world.rank], IDENTITY, world)
    rows, lines = sorted(kept.rows()), kept.gathered()
    kept.drop()
    return rows, lines


def refused(world: World, folders: list[Path], identity: dict) -> str:
    try:
        KeptAnswers(folders[world.rank], identity, world).rows()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("is_shared", [True, False], ids=["one folder", "a folder per node"])
def test_ranks_answer_what_no_rank_has_answered_and_the_main_rank_gets_all_in_order(tmp_path, is_shared):
    folders = [tmp_path / "shared"] * 3 if is_shared else [tmp_path / str(rank) for rank in range(3)]
    assert run_ranks(3, keep, folders, [[4, 0], [], [5]], ranks_per_node=1) == [[]] * 3
    assert run_ranks(3, keep, folders, [[], [7, 1], [2]], ranks_per_node=1) == [[0, 4, 5]] * 3
    words = run_ranks(3, refused, folders, IDENTITY | {"seed": 1}, ranks_per_node=1)
    assert all("seed was 0 and is 1; give it the same ones to go on, another run.dir" in message for message in words)
    (rows, lines), *others = run_ranks(3, gather, folders, ranks_per_node=1)
    assert rows == [0, 1, 2, 4, 5, 7]
    assert [json.loads(line) for line in lines] == answers_of(*rows)
    assert others == [(rows, [])] * 2
    assert not any((folder / FOLDER).exists() for folder in folders)


def test_half_a_line_at_the_end_is_no_answer_and_nothing_is_appended_to_it(tmp_path, world):
    kept = KeptAnswers(tmp_path, IDENTITY, world)
    kept.add(answers_of(3, 1))
    part = tmp_path / FOLDER / "rank_00000.jsonl"
    part.write_bytes(part.read_bytes() + b'{"row": 2, "resp')
    again = KeptAnswers(tmp_path, IDENTITY, world)
    assert again.rows() == {1, 3}
    again.add(answers_of(2))
    assert [json.loads(line) for line in part.read_text().splitlines()] == answers_of(3, 1, 2)
    assert [json.loads(line) for line in again.gathered()] == answers_of(1, 2, 3)


def kill_in_the_middle(settings: list[str | Path], folder: Path) -> list[dict]:
    """Start `generate`, kill it once some answers are on disk, and return those."""
    pattern = f"generate/*/{FOLDER}/rank_00000.jsonl"
    job = begin_job("generate", *settings)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and job.exitcode is None:
        if any(part.read_bytes().count(b"\n") >= 32 for part in folder.glob(pattern)):
            break
        time.sleep(0.005)
    end(job, grace_seconds=0.0)
    [part] = folder.glob(pattern)
    return [json.loads(line) for line in part.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.slow
def test_a_killed_generate_leaves_its_answers_and_the_same_command_again_goes_on(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "killed"
    settings = [config, *SETTINGS, f"run.dir={folder}"]
    left = kill_in_the_middle(settings, folder)
    assert 32 <= len(left) < NUM_ROWS and not any(folder.glob("generate/*/generated.jsonl"))
    resumed = finished(run_job("generate", *settings))
    assert f"has {len(left)} of {NUM_ROWS} rows" in resumed.stderr
    assert f"generated {NUM_ROWS - len(left)}/{NUM_ROWS - len(left)} rows" in resumed.stderr
    whole = finished(run_job("generate", config, *SETTINGS, f"run.dir={tmp_path / 'whole'}"))
    [path] = folder.glob("generate/*/generated.jsonl")
    lines = path.read_text().splitlines()
    assert [line for line in resumed.stdout.splitlines() if line.startswith("{")] == lines
    records, expected = (
        [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")] for job in (resumed, whole)
    )
    assert [record["row"] for record in records] == list(range(NUM_ROWS))
    for record, one in zip(records, expected, strict=True):
        assert record.pop("logprob") == pytest.approx(one.pop("logprob"), abs=1e-3)
        assert record == one
    # The model made by code stays beside what was found; nothing else does.
    assert {path.name for path in path.parent.iterdir()} == {"generated.jsonl", "generate.summary.json"}
    assert {path.name for path in folder.iterdir()} == {"generate", "initial_model"}


def test_resume_never_puts_the_answers_of_an_interrupted_generate_aside(tmp_path, world):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    few = ["data.eval=synthetic://addition?low=0&high=9&count=5&split=test", f"run.dir={folder}"]
    finished(run_job("generate", config, *few))
    [path] = folder.glob("generate/*/generated.jsonl")
    KeptAnswers(path.parent, {"seed": 9}, world).add(answers_of(0))
    path.unlink()
    assert "interrupted `generate` with other settings" in run_job("generate", config, *few).stderr
    job = finished(run_job("generate", config, *few, "resume=never"))
    assert "generated 5/5 rows" in job.stderr
    assert json.loads((path.parent / f"{FOLDER}.1" / "rank_00000.jsonl").read_text()) == answers_of(0)[0]
    assert not (path.parent / FOLDER).exists() and len(path.read_text().splitlines()) == 5


def test_damaged_lines_are_answered_anew_and_a_damaged_identity_is_refused(tmp_path, world):
    kept = KeptAnswers(tmp_path, {"seed": 0}, world)
    kept.add(answers_of(0, 1, 2))
    path = tmp_path / FOLDER / "rank_00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    odd = [b"null\n", b"[1]\n", b'{"row": "1"}\n', b'{"row": true}\n', b'{"row": -1}\n', b"[" * 50_000 + b"\n"]
    path.write_bytes(b"".join([lines[0], lines[1].replace(b"r", b"\xf2"), *odd, lines[2]]))
    assert KeptAnswers(tmp_path, {"seed": 0}, world).rows() == {0, 2}
    for content in (b"", b"null", b"\xff", b"[" * 50_000):
        (tmp_path / FOLDER / "identity.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"identity.json is damaged; .* resume=never"):
            KeptAnswers(tmp_path, {"seed": 0}, world).rows()

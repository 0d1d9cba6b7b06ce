"""The rollout bench: every engine generates the same rows to the same lengths, and a missing one has the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.harness.in_turn import ContenderResults
from tests.bench.rollout.rollout import check_same_work
from tests.bench.rollout.rollout_work import EngineRun, RolloutWork, WorkSize, counted, make_work

SIZE = WorkSize(num_prompts=40, group_size=8, prompt_length=6, limit=64, vocab_size=512)


def work_of(size: WorkSize = SIZE) -> RolloutWork:
    return make_work(size, rows_at_once=4, threads=1)


def measured(row_lengths: list[int]) -> EngineRun:
    return EngineRun(1.0, 1.0, tuple(row_lengths), {})


def test_every_distribution_asks_for_a_quarter_of_the_limit_in_the_mean():
    lengths = work_of().lengths
    assert set(lengths["fixed"].limits) == {16}
    lognormal = lengths["lognormal"].limits
    assert sum(lognormal) / len(lognormal) == pytest.approx(16, rel=0.15) and max(lognormal) > 40
    assert len(lengths["ragged"].stop_ids) / SIZE.vocab_size == 1 / 16 and set(lengths["ragged"].limits) == {64}


def test_work_survives_a_file(tmp_path: Path):
    work_of().save(tmp_path)
    assert RolloutWork.load(tmp_path) == work_of()


def test_tokens_count_up_to_the_first_stop_token_or_the_limit():
    assert counted([5, 6, 7, 8], 3, frozenset()) == 3
    assert counted([5, 6, 0, 0], 9, frozenset({6})) == 2
    assert counted([5, 6], 1, frozenset({6})) == 1


def test_too_few_or_too_many_tokens_are_refused():
    work = work_of(WorkSize(num_prompts=1, group_size=2, prompt_length=4, limit=8, vocab_size=64))
    good = {"fixed": measured([2, 2]), "ragged": measured([1, 8])}
    check_same_work({(name, "native"): ContenderResults([found]) for name, found in good.items()}, work)
    for name, lengths in (("fixed", [2, 1]), ("fixed", [2]), ("ragged", [1, 9]), ("ragged", [0, 3])):
        with pytest.raises(RuntimeError, match=f"other was given {name}"):
            check_same_work({(name, "other"): ContenderResults([measured(lengths)])}, work)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_rollout_bench_compares_all_engines_and_names_what_is_missing(capfd, tmp_path: Path):
    sizes = ["--models", "1M", "--prompts", "2", "--group-size", "3", "--prompt-length", "8", "--limit", "16"]
    nowhere = str(tmp_path / "python")
    assert main(["rollout", *sizes, "--rows-at-once", "4", "--rounds", "1", "--vllm-python", nowhere, "--json"]) == 0
    content = json.loads(capfd.readouterr().out)
    rows = {(row["engine"], row["lengths"]): row for row in content["rows"]}
    for lengths in ("fixed", "lognormal", "ragged"):
        for engine in ("native", "generate"):
            assert rows[engine, lengths]["tokens/s"] > 0, rows[engine, lengths]["remark"]
        assert "No such file" in rows["vllm", lengths]["remark"]
        assert 0 < rows["native", lengths]["of matmul"] < 1
        assert content["ratios"][f"native_vs_generate_{lengths}"] > 0
    assert rows["native", "fixed"]["mean length"] == rows["generate", "fixed"]["mean length"] == 4
    assert "native_vs_vllm" not in content["ratios"]

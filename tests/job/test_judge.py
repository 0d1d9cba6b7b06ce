"""Whole runs whose rewards come from a frozen judge: as transformers reads it, alike on two ranks, after a crash."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.jobs import finished, inline_config, memory_at_ends, metrics_of, run_job, untimed, weights_digest

from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.nouns.settings.role_configs import JudgeConfig

# Other tokens than the policy's, so that nothing but text may go between them.
OTHER = (
    "model.make={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, "
    "intermediate_size: 48, max_position_embeddings: 48, chars: '+=9876543210 ?-'}"
)
TEMPLATE = "{prompt}{answer}?{response}?"
JUDGE = JudgeConfig(path="unused", template=TEMPLATE, max_tokens=3, pattern=r"^(\d+)$", scale=4.0)
LEARNT = ("reward", "rewards/judge/mean", "judge/unread", "loss", "grad_norm")


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """The folder of a run that taught a model to count, roughly, the plus signs of texts, and to write `-` for some."""
    folder = tmp_path_factory.mktemp("judge")
    texts = [f"{one}+{two}={one + two}?{'+' * (two % 4)}{one}?" for one in range(10) for two in range(10)]
    rows = [{"prompt": text, "answer": "-" if "7" in text else str(text.count("+"))} for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [OTHER, f"data.train={folder / 'rows.jsonl'}", f"run.dir={folder / 'run'}"]
    settings += ["sft={max_steps: 30, rows_per_step: 64, optim: {lr: 3e-3}}"]
    finished(run_job("sft", inline_config(folder), *settings))
    return folder / "run"


def judged(judge: Path) -> list[str]:
    section = {"path": str(judge), "template": TEMPLATE, "max_tokens": 3, "pattern": JUDGE.pattern, "scale": 4.0}
    # More than a simulated device has beside the policy's cache, unless it is small.
    section["kv_cache_gib"] = 0.02
    return [f"reward.judge={json.dumps({**section, 'weight': 2.0})}", "checkpoint.interval=2", "train.max_steps=4"]


@pytest.fixture(scope="module")
def whole(judge, tmp_path_factory) -> Path:
    """A run of four steps on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    settings = [*judged(judge), f"run.dir={folder / 'run'}", "log.samples_per_step=32", "reshard.swap=always"]
    finished(run_job("train", inline_config(folder), *settings, ranks=2))
    return folder


def verdict_of_transformers(folder: Path, question: str) -> str:
    from transformers import AutoModelForCausalLM

    tokenizer, model = ModelTokenizer(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.raw(question, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=list(tokenizer.stop_token_ids))
    return tokenizer.decode(out[0, ids.shape[1] :].tolist())


@pytest.mark.ranks
def test_rewards_are_what_transformers_greedy_verdicts_say(judge, whole):
    samples = [json.loads(line) for line in (whole / "run/samples.jsonl").read_text().splitlines()]
    model, scores = judge / "checkpoints/step_000030/model", []
    for sample in samples[:32]:
        question = f"{sample['prompt']}{sample['answer']}?{sample['response']}?"
        score = JUDGE.score(verdict_of_transformers(model, question))
        scores.append(score)
        assert sample["parts"].get("judge") == score, (sample, score)
        expected = None if score is None else pytest.approx(sample["parts"]["share_of_digits"] + 2.0 * score, abs=1e-6)
        assert sample["reward"] == expected and (sample["verdict"] == "left_out") == (score is None)
    assert len(set(scores)) > 2 and None in scores, scores
    first = metrics_of(whole / "run")[0]
    assert first["judge/unread"] == scores.count(None) and first["judge/unasked"] == 0
    assert first["reward/unscored_ratio"] == scores.count(None) / 32


@pytest.mark.ranks
def test_one_rank_judges_as_two(judge, whole, tmp_path):
    settings = [*judged(judge), "train.max_steps=2", f"run.dir={tmp_path / 'run'}", "reshard.swap=never"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    for alone, together in zip(metrics_of(tmp_path / "run"), metrics_of(whole / "run"), strict=False):
        assert {name: alone[name] for name in LEARNT} == pytest.approx({name: together[name] for name in LEARNT}, 1e-4)


@pytest.mark.ranks
def test_a_judged_run_that_died_goes_on_to_the_last_bit_but_under_no_other_judge(judge, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    # As if the job had died before the last checkpoint was written.
    shutil.rmtree(run / "checkpoints/step_000004")
    settings = [*judged(judge), f"run.dir={run}", "log.samples_per_step=32", "reshard.swap=always"]
    other = run_job("train", inline_config(tmp_path), *settings, f"reward.judge.path={whole / 'run/initial_model'}")
    assert other.returncode == 2 and "the judge's weights was" in other.stderr
    finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    assert weights_digest(run, 4) == weights_digest(whole / "run", 4)
    assert untimed(metrics_of(run)) == untimed(metrics_of(whole / "run"))


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_that_share_a_judge_judge_as_one(judge, whole, tmp_path):
    settings = [*judged(judge), f"run.dir={tmp_path / 'run'}", "reward.judge.layout={tensor: 2}"]
    job = finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    assert "judge tensor 2" in job.stdout
    for shared, own in zip(metrics_of(tmp_path / "run"), metrics_of(whole / "run"), strict=True):
        expected = {name: own[name] for name in LEARNT}
        assert {name: shared[name] for name in LEARNT} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "problem"), [("{tensor: 3}", "does not divide the job's 2 ranks"), ("{expert: 2}", "has no experts")]
)
def test_a_judge_that_a_layout_cant_cut_is_refused(judge, tmp_path, layout, problem):
    settings = [*judged(judge), f"run.dir={tmp_path / 'run'}", f"reward.judge.layout={layout}"]
    job = run_job("train", inline_config(tmp_path), *settings, ranks=2)
    assert job.returncode == 2 and "reward.judge.layout" in job.stderr and problem in job.stderr


@pytest.mark.ranks
def test_the_ledger_has_a_judge_on_the_host_and_its_cache_in_its_own_state(whole):
    at_end_of = memory_at_ends(whole / "run")
    assert all(held.get("d judge_weights", 0) == 0 < held["o judge_weights"] for held in at_end_of.values())
    assert at_end_of["judge"]["p kv_cache"] > 0 == at_end_of["judge"]["d kv_cache"]


def test_a_judge_may_be_the_only_one_who_rewards(judge, tmp_path):
    settings = [*judged(judge), "reward.functions=[]", "train.max_steps=1", "log.samples_per_step=32"]
    finished(run_job("train", inline_config(tmp_path), *settings, f"run.dir={tmp_path / 'run'}"))
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    parts = [sample["parts"].get("judge") for sample in samples]
    assert [sample["reward"] for sample in samples] == [part if part is None else 2.0 * part for part in parts]
    assert any(parts) and {name for sample in samples for name in sample["parts"]} == {"judge"}


def test_questions_that_the_judge_has_no_positions_for_are_counted(judge, tmp_path):
    long = [*judged(judge), "reward.judge.template='{response}" + "1" * 44 + "?'", "train.max_steps=1"]
    finished(run_job("train", inline_config(tmp_path), *long, f"run.dir={tmp_path / 'run'}"))
    (step,) = metrics_of(tmp_path / "run")
    # All but responses without text.
    assert step["judge/unasked"] > 20 and step["reward/unscored_ratio"] >= step["judge/unasked"] / 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward.judge.max_tokens=48"], "48 positions, which leaves none for a question; lower"),
        (["reward.judge.template=none"], "reward.judge.template has no {response}"),
        (["reward.judge.pattern='[0-9]+'"], "has no group; put parentheses around the number"),
        (["reward.judge.pattern='('"], "is no regular expression"),
        (["algo={name: dapo}"], "too late to generate more by its scores; set algo.max_refills to 0"),
    ],
)
def test_a_judge_that_could_not_work_is_refused(judge, tmp_path, settings, message):
    refused = run_job("train", inline_config(tmp_path), *judged(judge), *settings, f"run.dir={tmp_path / 'run'}")
    assert refused.returncode == 2 and re.search(re.escape(message), refused.stderr.replace("\n", " ")), refused.stderr

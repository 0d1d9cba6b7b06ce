"""Whole jobs that learn from pairs of responses: alike on two ranks, and after a crash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.jobs import finished, metrics_of, run_job, summary_of, tiny_config, untimed, weights_digest

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.model_weights import WeightFiles
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.objectives import pair_rows
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh

ONLINE = ["algo={name: online_dpo, sft_coef: 0.1}", "train.updates_per_step=2", "checkpoint.interval=2"]
LEARNT = ("loss", "grad_norm", "preference/margin", "preference/accuracy", "preference/chosen", "preference/rejected")


@pytest.fixture(scope="module")
def online(tmp_path_factory) -> Path:
    """A run of four steps on two ranks."""
    folder = tmp_path_factory.mktemp("online")
    finished(run_job("train", tiny_config(folder), *ONLINE, "train.max_steps=4", f"run.dir={folder / 'run'}", ranks=2))
    return folder


@pytest.mark.ranks
def test_each_prompt_gives_its_best_and_worst_response_or_none(online):
    for step in metrics_of(online / "run"):
        reasons = [step["select/no_reward"], step["select/tied"], step["select/between"]]
        assert sum(reasons) == step["select/dropped_rows"] == step["dock/dropped"]
        num_tied = step["select/tied"] / 4
        assert step["select/between"] == 2 * (8 - num_tied) and step["update/rows"] == 2 * (8 - num_tied)
        assert step["preference/margin"] == pytest.approx(
            step["preference/chosen"] - step["preference/rejected"], abs=1e-6
        )
    assert metrics_of(online / "run")[-1]["preference/margin"] != 0


@pytest.mark.ranks
def test_online_dpo_on_one_rank_and_on_two_learns_the_same(online, tmp_path):
    run = tmp_path / "run"
    finished(run_job("train", tiny_config(tmp_path), *ONLINE, "train.max_steps=2", f"run.dir={run}"))
    for alone, together in zip(metrics_of(run), metrics_of(online / "run"), strict=False):
        for name in LEARNT:
            assert alone[name] == pytest.approx(together[name], rel=1e-4, abs=1e-6), name


@pytest.mark.ranks
def test_online_dpo_that_died_goes_on_to_the_last_bit(online, tmp_path):
    shutil.copytree(online, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints/step_000004")
    settings = [*ONLINE, "train.max_steps=4", f"run.dir={run}"]
    assert "resumed from" in finished(run_job("train", tiny_config(tmp_path), *settings, ranks=2)).stdout
    assert weights_digest(run, 4) == weights_digest(online / "run", 4)
    assert untimed(metrics_of(run)) == untimed(metrics_of(online / "run"))


PAIRS = [
    "data.train=synthetic://addition?low=0&high=9&count=40&max_error=5",
    "data.eval=synthetic://addition?low=0&high=9&count=9&split=test&test_fraction=0.3&max_error=5",
    "eval.before_train=true", "eval.interval=2", "checkpoint.interval=2",
]  # fmt: skip
VERBS = {
    "preferences": ["preferences={max_steps: 4, rows_per_step: 7, sft_coef: 0.1, optim: {lr: 1.0e-3}}"],
    "reward-model": [
        "reward_model={max_steps: 4, rows_per_step: 7, centring: 0.01, optim: {lr: 1.0e-3}, margin_key: margin}"
    ],
}
LEARNT_OF_PAIRS = ("loss", "grad_norm", "preference/margin", "preference/accuracy", "eval/loss", "eval/accuracy")


def pair_settings(verb: str, folder: Path) -> list[str | Path]:
    settings = [tiny_config(folder), *PAIRS, *VERBS[verb]]
    if verb == "reward-model":
        rows = [
            {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + a % 3), "margin": 0.1 * (a % 3)}
            for a in range(10)
            for b in range(4)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings += [f"data.train={folder / 'pairs.jsonl'}", f"data.eval={folder / 'pairs.jsonl'}", "eval.max_rows=9"]
    return settings


@pytest.fixture(scope="module", params=VERBS)
def trained(request, tmp_path_factory) -> tuple[str, Path]:
    """A run of four steps of seven pairs on one rank."""
    folder = tmp_path_factory.mktemp("pairs")
    finished(run_job(request.param, *pair_settings(request.param, folder), f"run.dir={folder / 'run'}"))
    return request.param, folder


def test_pairs_are_learnt_and_held_out_ones_are_counted(trained):
    verb, folder = trained
    steps, summary = metrics_of(folder / "run"), summary_of(folder / "run")
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert ["eval/accuracy" in step for step in steps] == [True, False, True, False, True]
    assert summary["accuracy_before"] == steps[0]["eval/accuracy"] == 0.5, "a new head, or the reference itself"
    assert summary["accuracy_after"] == steps[4]["eval/accuracy"] and summary["eval_prompts"] == 9
    assert (steps[0]["eval/loss"] == pytest.approx(0.6931 + 0.1 * 2.7, abs=0.1)) == (verb == "preferences")
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 and step["update/skipped"] == 0 for step in steps[1:])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", ["{data: 2, shard: 1}", "{shard: 2}", "{tensor: 2}", "{context: 2}", "{pipeline: 2}"]
)
def test_one_rank_and_two_learn_the_same_of_pairs(trained, tmp_path, layout):
    verb, folder = trained
    settings = [*pair_settings(verb, tmp_path), "train.max_tokens_per_microbatch=40", f"resources.update={layout}"]
    finished(run_job(verb, *settings, f"run.dir={tmp_path / 'run'}", ranks=2))
    for together, alone in zip(metrics_of(tmp_path / "run"), metrics_of(folder / "run"), strict=True):
        expected = {name: alone[name] for name in LEARNT_OF_PAIRS if name in alone}
        assert {name: together[name] for name in expected} == pytest.approx(expected, rel=2e-3, abs=2e-5)


def test_a_run_on_pairs_that_died_goes_on_to_the_last_bit(trained, tmp_path):
    verb, folder = trained
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints/step_000004")
    resumed = finished(run_job(verb, *pair_settings(verb, tmp_path), f"run.dir={run}"))
    assert "resumed from" in resumed.stdout
    assert weights_digest(run, 4) == weights_digest(folder / "run", 4)
    assert untimed(metrics_of(run)) == untimed(metrics_of(folder / "run"))
    shutil.rmtree(run / "checkpoints/step_000004")
    other = run_job(verb, *pair_settings(verb, tmp_path), f"run.dir={run}", f"{verb.replace('-', '_')}.rows_per_step=6")
    assert other.returncode == 2 and "rows_per_step was 7 and is 6" in other.stderr


@pytest.mark.parametrize("part", ["chosen", "rejected"])
def test_a_run_is_not_gone_on_with_on_other_pairs(tmp_path, part):
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
    settings = [tiny_config(tmp_path), "preferences={max_steps: 1, rows_per_step: 4}", f"run.dir={tmp_path / 'run'}"]
    for own in (rows, [row | {part: "0+"} for row in rows]):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        job = run_job("preferences", *settings, f"data.train={tmp_path / 'pairs.jsonl'}")
    assert job.returncode == 2 and "belongs to another run: rows of data.train was" in job.stderr, job.stderr


def test_adapters_learn_of_pairs_without_a_second_model(tmp_path):
    adapters = ["lora={rank: 4, alpha: 8}", "checkpoint.interval=0"]
    finished(run_job("preferences", *pair_settings("preferences", tmp_path), *adapters, f"run.dir={tmp_path / 'run'}"))
    margins = [step["preference/margin"] for step in metrics_of(tmp_path / "run")[1:]]
    assert margins[0] == 0 and 0 not in margins[1:]
    settings = [*pair_settings("reward-model", tmp_path), *adapters, f"run.dir={tmp_path / 'other'}"]
    refused = run_job("reward-model", *settings)
    assert refused.returncode == 2 and "leave out lora" in refused.stderr


def qwen_like_model(folder: Path) -> Path:
    """A model whose tokenizer pads with its stop token, as those of Qwen's base models do."""
    model = folder / "base"
    chars = "0123456789+="
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
    }
    make_model_folder(model, MakeConfig(**sizes, max_position_embeddings=32, chars=chars), seed=0)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        content = json.loads((model / name).read_text())
        content |= {"pad_token": "<eos>"} if "pad_token" in content else {"pad_token_id": 2}
        (model / name).write_text(json.dumps(content))
    return model


def test_a_saved_reward_model_gives_its_scores_in_transformers(tmp_path, world):
    transformers = pytest.importorskip("transformers")
    base, run = qwen_like_model(tmp_path), tmp_path / "run"
    settings = [
        f"model.path={base}", *PAIRS, "reward_model={max_steps: 3, rows_per_step: 8, optim: {lr: 1.0e-2}}",
        f"run.dir={run}",
    ]  # fmt: skip
    finished(run_job("reward-model", *settings))
    folder = run / "checkpoints/step_000003/model"
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1 and not report["missing_keys"] and not report["unexpected_keys"]
    # What training packs, padded on either side: each row ends with the stop token, which is scored.
    prompts = [Prompt(str(n), (), "", None, {}, f"{n}+{n}=", str(2 * n), str(2 * n + 7)) for n in (1, 30)]
    rows = pair_rows(prompts, Renderer(ModelTokenizer(folder)))
    engine = TrainingEngine(
        read_config(folder), TrainingConfig(), OptimConfig(),
        build_update_mesh(fit_update_layout(UpdateLayout(), 1), world.device, 0), world.device,
        frozen=True, compute_dtype=torch.float32, rating="row_values",
    )  # fmt: skip
    engine.load(WeightFiles(folder))
    expected_B = engine.values(rows).cpu()
    for side in ("left", "right"):
        tokenizer.padding_side = side
        ids = {"input_ids": [run.tolist() for run in rows.tokens_T.split(rows.lengths_B.tolist())]}
        with torch.no_grad():
            found_B = model(**tokenizer.pad(ids, return_tensors="pt")).logits.squeeze(1)
        torch.testing.assert_close(found_B, expected_B, rtol=1e-4, atol=1e-5)
    assert expected_B.std() > 1e-3 and "text-classification" in (folder / "README.md").read_text()
    # And as the model that another run starts from.
    finished(run_job("reward-model", *settings, f"model.path={folder}", f"run.dir={tmp_path / 'further'}"))
    before, after = metrics_of(tmp_path / "further")[0], metrics_of(run)[-1]
    assert before["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "settings", "problem"),
    [
        ([{"prompt": "1+1=", "chosen": "2"}], [], "no 'rejected'; rows of pairs have a prompt"),
        ([{"prompt": "1+1=", "chosen": "2", "rejected": "2"}], [], "are the same, so there is nothing to prefer"),
        ([{"prompt": "1+1=", "chosen": "2", "rejected": "3" * 30}], [], "has 35 tokens, but the model"),
        (
            [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}],
            ["preferences.max_steps=0"],
            "preferences.max_steps is 0",
        ),
        (
            [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}],
            ["preferences.loss_type=hinge", "preferences.label_smoothing=0.1"],
            "label_smoothing is 0.1, but loss_type hinge has no form with it",
        ),
    ],
)
def test_what_can_not_be_learnt_of_pairs_is_refused_with_its_row(tmp_path, rows, settings, problem):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [tiny_config(tmp_path), f"data.train={data}", "preferences.max_steps=1", *settings]
    job = run_job("preferences", *given, f"run.dir={tmp_path / 'run'}")
    assert job.returncode == 2 and problem in job.stderr and "Traceback" not in job.stderr, job.stderr

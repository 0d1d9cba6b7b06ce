"""The bench of algorithms: runs are made once, rows are what runs found, and the picture has a panel per algorithm."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.algorithms.table import ALGORITHMS
from spmdrl.config.config import load_config
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.job.start.checked_run import Verb
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.statistics import Estimate
from spmdrl.observability.summary import write_summary
from tests.bench.__main__ import main
from tests.bench.harness.train_runs import words_of
from tests.bench.learning.algorithms_bench import add_arguments, run
from tests.bench.learning.learning_plot import curves_svg
from tests.bench.learning.learning_runs import LearningCurve, finish, settings_of
from tests.bench.learning.recipes import FAMILIES, PAIR_VERBS, QUICKSTART, RECIPES, START, Settings, recipe_of

SVG = "{http://www.w3.org/2000/svg}"


def write_finished(verb: str, folder: Path, settings: Settings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "spmdrl", *words_of(verb, settings, folder)]
    write_summary(folder, verdict="done", command=shlex.join(command))


def write_trained(work: Path, algorithm: str, seed: int, accuracies: dict[int, float]) -> None:
    """A finished run of one step that was evaluated so."""
    folder = work / f"{algorithm}-{seed}"
    write_finished("train", folder, settings_of(algorithm, seed, work=work, num_steps=1))
    write_evaluations(folder, accuracies)


def write_evaluations(folder: Path, accuracies: dict[int, float]) -> None:
    lines = [
        {"step": step, "eval/accuracy": value, "eval/accuracy_low": value - 0.04, "eval/accuracy_high": value + 0.04}
        for step, value in accuracies.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def parsed(work: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--work", str(work), "--steps", "1", *words])


def curve(algorithm: str, seed: int, *accuracies: float) -> LearningCurve:
    return LearningCurve(
        algorithm, seed, {step: Estimate(value, value, value) for step, value in enumerate(accuracies)}
    )


@pytest.mark.slow
def test_a_run_is_left_alone_only_where_it_finished_with_the_same_settings(tmp_path: Path):
    folder, settings = tmp_path / "run", {"model.path": tmp_path / "no model", "data.train": "no data"}
    write_finished("train", folder, settings)
    finish("train", folder, settings)
    with pytest.raises(RuntimeError, match=r"no\.key"):
        finish("train", folder, {**settings, "no.key": 1})
    write_summary(folder, verdict="running")
    with pytest.raises(RuntimeError, match="no data|no model"):
        finish("train", folder, settings)


def test_rows_are_the_accuracies_of_runs_and_chief_algorithms_must_improve_by_more_than_the_interval(tmp_path: Path):
    write_finished("sft", tmp_path / "start", START)
    for seed in range(3):
        write_trained(tmp_path, "gspo", seed, {0: 0.5, 1: 0.6 + 0.1 * seed})
    write_trained(tmp_path, "grpo", 0, {0: 0.5, 1: 0.52})
    table = run(parsed(tmp_path, "--algorithms", "gspo", "grpo"))
    assert table.passed
    assert [(row["algorithm"], row["seed"], row["accuracy_after"]) for row in table.rows] == [
        ("gspo", 0, 0.6), ("gspo", 1, 0.7), ("gspo", 2, 0.8), ("grpo", 0, 0.52),
    ]  # fmt: skip
    assert table.rows[0] == {
        "algorithm": "gspo", "seed": 0, "accuracy_before": 0.5, "accuracy_after": 0.6, "interval": [0.56, 0.64],
    }  # fmt: skip
    assert table.notes[0].startswith("gspo: +0.200 (+0.100 to +0.300), by more than its interval in 3 of 3")
    write_trained(tmp_path, "gspo", 1, {0: 0.5, 1: 0.57})
    assert not run(parsed(tmp_path, "--algorithms", "gspo")).passed


@pytest.mark.parametrize(("student", "passed"), [(0.77, True), (0.75, False)])
def test_a_student_must_reach_95_percent_of_its_teacher(tmp_path: Path, student: float, passed: bool):
    write_finished("sft", tmp_path / "start", START)
    write_trained(tmp_path, "gspo", 0, {0: 0.5, 1: 0.8})
    write_trained(tmp_path, "opd", 0, {0: 0.5, 1: student})
    table = run(parsed(tmp_path, "--algorithms", "opd"))
    assert table.passed is passed and f"it reaches {student:.3f}, its teacher 0.800" in table.notes[0]


@pytest.mark.parametrize(("in_order", "passed"), [(0.91, True), (0.89, False)])
def test_a_verb_of_pairs_must_order_nine_of_ten(tmp_path: Path, in_order: float, passed: bool):
    write_finished("sft", tmp_path / "start", START)
    folder = tmp_path / "reward-model-0"
    settings = {**PAIR_VERBS["reward-model"], "model.path": tmp_path / "start", "seed": 0}
    write_finished("reward-model", folder, settings)
    write_evaluations(folder, {0: 0.5, 120: in_order})
    table = run(parsed(tmp_path, "--algorithms", "reward-model"))
    assert table.passed is passed and table.rows[0]["accuracy_after"] == in_order
    assert table.notes[0].endswith("accuracies are of ordering pairs")


def test_the_picture_has_a_panel_per_algorithm_with_the_mean_of_its_seeds(tmp_path: Path):
    curves = {
        "<ppo>": [curve("<ppo>", 0, 0.5, 0.6), curve("<ppo>", 1, 0.5, 0.8)],
        **{name: [curve(name, 0, 0.5, 0.4)] for name in "abcd"},
    }
    root = ElementTree.fromstring(curves_svg(curves))
    texts = [text for element in root.iter(f"{SVG}text") for text in element.itertext()]
    assert {"<ppo>", *"abcd"} <= set(texts) and ", 2 seeds" in texts
    ends = [line.get("points", "").split()[-1].split(",") for line in root.iter(f"{SVG}polyline")]
    # Accuracies of 0.38 to 0.82 fill 120 pixels, so 0.7 is at 120 * 0.12 / 0.44 from the top.
    assert float(ends[0][1]) == pytest.approx(120 * 0.12 / 0.44, abs=0.1) and len(ends) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--algorithms", "sarsa"], "sarsa isn't one of grpo"), (["--seeds", "0"], "--seeds is 0")],
)
def test_what_cant_be_run_is_refused_before_anything_is(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        run(parsed(tmp_path / "work", *words))
    assert not (tmp_path / "work").exists()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model_folder(
        folder, MakeConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), seed=0
    )
    return folder


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: config.name)
def test_a_run_can_start_with_the_settings_of_every_algorithm(config: type[AlgoConfig], tmp_path: Path, tiny_model):
    settings = settings_of(config.name, 0, work=tmp_path, num_steps=30) | {"model.path": tiny_model}
    if recipe_of(config.name).needs_teacher:
        settings |= {"teacher.path": tiny_model}
    _, *words = words_of("train", settings, tmp_path / "run")
    assert check_run(load_config([], words), "train").algorithm.config.name == config.name


@pytest.mark.parametrize("verb", PAIR_VERBS)
def test_a_run_can_start_with_the_settings_of_verbs_of_pairs(verb: Verb, tmp_path: Path, tiny_model):
    _, *words = words_of(verb, {**PAIR_VERBS[verb], "model.path": tiny_model}, tmp_path / "run")
    assert check_run(load_config([], words), verb).num_steps > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_can_start_with_the_settings_of_every_family(family: str, tmp_path: Path):
    _, *words = words_of("train", FAMILIES[family], tmp_path / "run")
    make = check_run(load_config([QUICKSTART], words), "train").config.model.make
    assert make is not None and make.model_type == family


def test_a_family_must_improve_by_more_than_the_interval(tmp_path: Path):
    folder = tmp_path / "gpt_oss-0"
    write_finished("train", folder, {**FAMILIES["gpt_oss"], "seed": 0})
    for after, passed in ((0.6, True), (0.57, False)):
        write_evaluations(folder, {0: 0.5, 220: after})
        assert run(parsed(tmp_path, "--algorithms", "gpt_oss", "--seeds", "1")).passed is passed


def test_recipes_are_those_of_algorithms_in_the_table():
    assert RECIPES.keys() <= {config.name for config in ALGORITHMS}


@pytest.mark.slow
def test_checkpoint_teacher_and_student_are_trained_and_not_again(tmp_path: Path):
    out = tmp_path / "out.json"
    finish("sft", tmp_path / "start", {**START, "sft.max_steps": 1})
    # From here on it passes for one of all steps.
    write_finished("sft", tmp_path / "start", START)
    picture = tmp_path / "figures" / "curves.svg"
    words = ["--work", str(tmp_path), "--algorithms", "opd", "--steps", "1", "--json", str(out)]
    main(["algorithms", *words, "--picture", str(picture)])
    content = json.loads(out.read_text())
    assert content["rows"][0].keys() == {"algorithm", "seed", "accuracy_before", "accuracy_after", "interval"}
    assert content["curves"][0]["held_out_accuracy_by_step"].keys() == {"0", "1", "2"}
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    trained = (tmp_path / "opd-0" / "metrics.jsonl").stat()
    main(["algorithms", *words])
    assert (tmp_path / "opd-0" / "metrics.jsonl").stat() == trained

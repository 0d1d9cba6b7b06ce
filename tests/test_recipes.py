"""Each recipe's configs are right, and take a step; the rows that a recipe makes are what its page says."""

import json
import subprocess
import sys

import pytest

from spmdrl.config.config import load_config
from spmdrl.dataflow.data.gym_rows import gym_rows
from spmdrl.engines.environment.episode import End, Episode, Turn
from spmdrl.engines.reward.calls import RewardCall
from spmdrl.engines.reward.gym_tasks import GYM_SCHEME
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.reward_config import CodeConfig, RewardConfig
from spmdrl.runtime.workers.loading import load_attribute
from tests.support.jobs import ROOT, finished, metrics_of, run_job

FOLDER = ROOT / "configs" / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))
STEP = (
    *("train.max_steps=1", "sft.max_steps=0", "eval.before_train=false", "data.eval=null"),
    *("rollout.prompts_per_step=4", "rollout.num_generations=4"),
)


def made_rows(recipe, folder):
    """The rows that the recipe's script writes, by split."""
    subprocess.run([sys.executable, FOLDER / recipe / "make_rows.py", folder], check=True)
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }


def test_each_recipe_has_a_page_with_its_command():
    folders = {path.parent for path in RECIPES}
    assert folders
    for path in RECIPES:
        assert f"train {path.relative_to(ROOT)}" in (path.parent / "README.md").read_text(), path


@pytest.mark.ranks
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_takes_a_step(tmp_path, path):
    made = []
    if GYM_SCHEME in path.read_text():
        pytest.importorskip("reasoning_gym")
    if (path.parent / "make_rows.py").exists():
        made_rows(path.parent.name, tmp_path / "rows")
        made = [f"data.train={tmp_path / 'rows' / 'train.jsonl'}"]
    finished(run_job("train", path, f"run.dir={tmp_path / 'run'}", *STEP, *made))
    (step,) = metrics_of(tmp_path / "run")
    assert step["reward/unscored_ratio"] == 0 and 0 <= step["reward"] < 1


@pytest.mark.parametrize("path", sorted((FOLDER / "reasoning_gym").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_question_that_is_held_out_is_trained_on(path):
    pytest.importorskip("reasoning_gym")
    data = load_config([path], []).value.data
    train, held_out = ([row["prompt"] for row in gym_rows(url)] for url in (data.train, data.eval))
    assert len(held_out) >= 150 and not set(train) & set(held_out)


def test_the_search_finds_what_the_supervised_start_shows(tmp_path):
    search = load_attribute(f"{FOLDER / 'search' / 'search.py'}:Search", "environment.function", (), kind="class")()
    rows = made_rows("search", tmp_path)
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["test"]}
    for row in rows["train"][:100] + rows["test"]:
        query, closed, rest = row["completion"].partition("]")
        asked = Episode(row["prompt"], row, 0, (), query + closed)
        assert rest == search.step(asked).text + row["answer"]
        assert search.step(Episode(row["prompt"], row, 0, (), row["answer"])) == End()


def test_a_search_has_an_end(tmp_path):
    kind = load_attribute(f"{FOLDER / 'search' / 'search.py'}:Search", "environment.function", (), kind="class")
    row = made_rows("search", tmp_path)["train"][0]
    turns = [(Turn("[xyz]", "nothing."),) * number for number in range(4)]
    asked = [Episode(row["prompt"], row, 0, earlier, "[xyz]") for earlier in turns]
    assert [getattr(kind().step(one), "text", None) for one in asked] == ["nothing."] * 3 + [None]


def test_the_tests_of_repairs_pass_the_repair_alone(tmp_path):
    rows = made_rows("code_repair", tmp_path)
    purposes = [{row["completion"].partition("return")[2] for row in rows[split]} for split in ("train", "test")]
    assert not purposes[0] & purposes[1]
    shown = rows["test"][:4]
    programs = [row["completion"] for row in shown] + [row["prompt"] for row in shown]
    columns = {"test_list": [row["test_list"] for row in shown * 2]}
    with RewardPool(RewardConfig(("code",), code=CodeConfig(score="all"))) as pool:
        pool.submit({"all": RewardCall(["p"] * 8, programs, [(1,)] * 8, columns)})
        (result,) = pool.collect(["all"])
    assert result.rewards == [1.0] * 4 + [0.0] * 4

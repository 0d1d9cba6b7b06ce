"""Each recipe's configs are right, and take a step."""

import pytest

from tests.support.jobs import ROOT, finished, metrics_of, run_job

RECIPES = sorted((ROOT / "configs" / "recipes").rglob("*.yaml"))
STEP = (
    *("train.max_steps=1", "sft.max_steps=0", "eval.before_train=false", "data.eval=null"),
    *("rollout.prompts_per_step=4", "rollout.num_generations=4"),
)


def test_each_recipe_has_a_page_with_its_command():
    folders = {path.parent for path in RECIPES}
    assert folders
    for path in RECIPES:
        assert f"train {path.relative_to(ROOT)}" in (path.parent / "README.md").read_text(), path


@pytest.mark.ranks
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_takes_a_step(tmp_path, path):
    finished(run_job("train", path, f"run.dir={tmp_path}", *STEP))
    (step,) = metrics_of(tmp_path)
    assert step["reward/unscored_ratio"] == 0 and 0 <= step["reward"] < 1

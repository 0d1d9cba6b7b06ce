"""`spmdrl init` and `spmdrl quickstart` begin a run without a clone: what they bring is what is tested here."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.cli.command_line import main
from spmdrl.cli.init_command import FOLDER, STARTS
from spmdrl.config.config import load_config

ROOT = Path(__file__).parents[1]
VERBS = {"dpo": ("sft", "preferences", "reward-model")}


def test_each_start_is_a_tested_configuration_of_the_clone() -> None:
    linked = {source: place for _, _, files in STARTS.values() for source, (place, _) in files.items()}
    assert {path.name for path in FOLDER.iterdir()} == set(linked)
    assert all((FOLDER / source).resolve() == ROOT / place for source, place in linked.items())


@pytest.mark.parametrize("name", STARTS)
def test_its_files_stand_side_by_side_and_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 0
    shown = capsys.readouterr().out
    files = [target for _, target in STARTS[name][2].values()]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    assert all(target in shown for target in files) and "next: " in shown
    text = (tmp_path / "run.yaml").read_text()
    assert "configs/" not in text and "$schema" not in text
    for verb in VERBS.get(name, ("train",)):
        config = load_config([tmp_path / "run.yaml"], [], verb).value
        named = [config.data.train, config.environment.function]
        assert all(
            (tmp_path / str(file).partition(":")[0]).is_file() for file in named if str(file).endswith(("l", "r"))
        )
    assert main(["init", name]) == 2
    assert "run.yaml exists" in capsys.readouterr().err


def test_a_folder_is_made_and_a_name_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "environment", "--to", str(tmp_path / "game")]) == 0
    assert (tmp_path / "game" / "game.py").is_file()
    assert f"cd {tmp_path / 'game'} && " in capsys.readouterr().out
    assert main(["init"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ["quickstart", "smollm2", "gsm8k", "dpo", "environment"])
    assert main(["init", "quikstart"]) == 2
    assert "did you mean quickstart?" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        assert main(["init", "quickstart", "--to", str(tmp_path / place)]) == 2
        shown = capsys.readouterr().err
        assert f"{tmp_path / place} takes no files: " in shown and "write elsewhere by --to FOLDER" in shown


def test_quickstart_trains_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = [
        "sft.max_steps=2",
        "train.max_steps=2",
        "data.eval=null",
        "rollout.prompts_per_step=4",
        "resources.device=cpu",
    ]
    assert main(["quickstart", *few]) == 0
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").is_file()
    capsys.readouterr()

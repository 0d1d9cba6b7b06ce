"""One line on the screen, the whole traceback in the run's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spmdrl.cli import failure_page
from spmdrl.cli.failure_page import INTERRUPTED, end_with, wants_traceback
from spmdrl.config.sources import split_arguments
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.supervision.ending import FirstFailure, PeerFailed, cause_of, death

RANK_1 = LaunchEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2)


def raised() -> Exception:
    try:
        split_arguments(None)  # type: ignore[arg-type]
    except Exception as failure:
        failure.args = ("the cause\nand more of it",)
        return failure
    raise AssertionError("it must fail")


def test_a_failure_is_one_line_with_its_place_and_file(tmp_path, capsys, monkeypatch):
    error_file = tmp_path / "gone" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    assert end_with(raised(), tmp_path, RANK_1) == 1
    path = tmp_path / "failures" / "rank_00001.txt"
    cause = r"spmdrl: rank 1: \w+Error: the cause \(at spmdrl/config/sources\.py:\d+\)"
    assert re.fullmatch(rf"{cause}; the traceback is in {path}\n", capsys.readouterr().err)
    assert path.read_text().rstrip().endswith("the cause\nand more of it")
    assert re.fullmatch(cause, json.loads(error_file.read_text())["message"]["message"])


def test_a_traceback_that_cannot_be_kept_is_shown(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert end_with(raised(), tmp_path / "file", LaunchEnvironment()) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("spmdrl: ") and rest[0] == "Traceback (most recent call last):"


def test_ctrl_c_that_another_rank_reports_is_not_reported_again(tmp_path, capsys):
    failure = PeerFailed(FirstFailure(0, cause_of(KeyboardInterrupt())))
    assert end_with(failure, tmp_path, RANK_1) == INTERRUPTED
    assert capsys.readouterr().err == "" and not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_killed_rank_is_named_once_on_the_screen_of_each_node(tmp_path, capsys, monkeypatch, victim):
    monkeypatch.setattr(failure_page.time, "sleep", lambda seconds: None)
    shown = {0: list[str](), 1: list[str]()}
    for rank in {0, 1, 2, 3} - {victim}:
        launch = LaunchEnvironment(rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2)
        assert end_with(PeerFailed(death(victim, 4711)), tmp_path, launch) == 1
        shown[launch.node_rank] += capsys.readouterr().err.splitlines()
    line = f"spmdrl: rank {victim}: process 4711 ended without a message, like a killed one"
    assert shown == {0: [line], 1: [line]}


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_tracebacks_are_shown_whole_where_they_are_wanted(value, wanted):
    assert wants_traceback({"SPMDRL_TRACEBACK": value}) is wanted

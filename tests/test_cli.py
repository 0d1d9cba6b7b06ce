"""The command line's own refusals, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.algorithms.table import ALGORITHMS
from spmdrl.cli.command_line import VERBS, main, usage
from spmdrl.cli.manual import VERB_PAGES
from spmdrl.config.config import Config
from spmdrl.config.key_schema import schema_keys
from spmdrl.config.reference import find_keys, key_page, known_names

OTHER_RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"} | {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def spmdrl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "spmdrl", *arguments, **environment)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


LIGHT = "torch|numpy|transformers|tensordict"
LIGHTER = LIGHT + "|pydantic"


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        ("--help", LIGHTER),
        ("train --help", LIGHTER),
        ("explain", LIGHTER),
        ("explain algo.reinforce_pp_baseline", LIGHTER),
        ("help optim.lr", LIGHT),
        ("help algo", LIGHT),
    ],
)
def test_pages_are_printed_without_what_computes(arguments: str, unneeded: str) -> None:
    done = spmdrl(*arguments.split(), PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0 and done.stdout
    assert "spmdrl.cli.command_line" in done.stderr and not re.findall(rf"\b(?:{unneeded})\b.*", done.stderr)


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {verb} " in page for verb in VERBS)


def test_the_program_that_msrun_starts_as_its_scheduler_ends_well_before_torch_is_imported() -> None:
    done = spmdrl("train", "run.yaml", MS_ROLE="MS_SCHED", PYTHONPROFILEIMPORTTIME="1")
    assert (done.returncode, done.stdout) == (0, "")
    assert "spmdrl.cli.command_line" in done.stderr and "torch" not in done.stderr


@pytest.mark.parametrize("arguments", [["help"], ["-h"], ["--help"]])
def test_help_is_found_wherever_it_stands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == usage()


@pytest.mark.parametrize("verb", sorted(VERB_PAGES))
def test_each_verb_has_a_page_with_two_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "run.yaml", "--help"]) == main(["help", verb]) == 0
    page = VERB_PAGES[verb]
    assert capsys.readouterr().out.startswith(page + page)
    assert main([verb, "--help"]) == 0 and capsys.readouterr().out == page
    assert page.startswith(f"usage: spmdrl {verb} ") and page.count(f" -m spmdrl {verb} ") == 2
    assert max(map(len, page.splitlines())) <= 120


def test_pages_of_verbs_name_keys_that_exist() -> None:
    keys = set(schema_keys(Config))
    sections = {key for key in keys if "." not in key}
    for page in VERB_PAGES.values():
        named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", page))
        named -= {f"algo.{config.name}" for config in ALGORITHMS}
        unknown = {name for name in named if name.partition(".")[0] in sections} - keys
        assert unknown <= {"eval.jsonl", "eval.summary.json", "run.yaml", "data.md"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "algo.kl_coef",
            ["algo.kl_coef: a number >= 0; default 0.0", "KL divergence", "beta (TRL)", "algo.kl_coef=VALUE"],
        ),
        ("seed", ["seed: a whole number >= 0; default 0", "in a file by seed: VALUE"]),
        ("optim", ["optim: a section", "  optim.lr (1.0e-06)", "peak learning rate"]),
        ("resources.update", ["resources.update.tensor (1)"]),
        ("epsilon", ["epsilon: TRL's name", "algo.clip_ratio_low: a number >= 0 and < 1; default 0.2"]),
        ("qlora", ["qlora isn't here: weights aren't quantized"]),
        ("lora", ["lora: a section", "lora.rank (32)"]),
        ("beta", ["it sets algo.kl_coef", "in preferences it sets preferences.beta\n"]),
        ("learning_rate", ["in sft it sets sft.optim.lr\n", "in reward-model it sets reward_model.optim.lr\n"]),
        ("preferences", ["usage: spmdrl preferences", "\npreferences: a section", "  preferences.beta (0.1)"]),
        ("multi_turn.max_assistant_turns", ["as many turns as rollout.max_completion_length has room for"]),
    ],
)
def test_a_key_a_section_and_a_name_of_others_are_explained(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", name]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words), out


def test_every_key_has_a_text_and_a_page() -> None:
    names = known_names(Config)
    for key in names.keys:
        entries = find_keys(Config, key)
        assert entries and all(entry.text for entry in entries), key
        assert (key_page(Config, key) or "").startswith(f"{key}: ")


def test_a_name_that_nothing_has_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "algo.kl_coeff"]) == 2
    assert capsys.readouterr().err == "spmdrl: there is no key or verb 'algo.kl_coeff'; did you mean algo.kl_coef?\n"
    assert main(["help", "trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian", "a.yaml"], "spmdrl: unknown verb 'trian'; did you mean train?\n"),
        (
            ["xyz"],
            "spmdrl: unknown verb 'xyz'; the verbs are quickstart, init, train, sft, preferences, reward-model, eval, "
            "generate, replay, convert, check, plan, launch, explain, doctor, report\n",
        ),
        (
            ["train"],
            "spmdrl: train needs a config; write spmdrl train FILE.yaml, such as the run.yaml of spmdrl init "
            "quickstart\n",
        ),
        ([], f"spmdrl: no verb given\n\n{usage()}\n"),
    ],
)
def test_a_wrong_command_is_one_message_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == expected


def test_half_a_launch_environment_is_refused_in_one_line() -> None:
    done = spmdrl("trian", RANK="0")
    assert done.returncode == 2
    assert done.stderr.startswith("spmdrl: the environment sets RANK but not ")
    assert "Traceback" not in done.stderr


def test_another_rank_speaks_after_the_first_and_names_itself() -> None:
    done = spmdrl("trian", **OTHER_RANK)
    assert done.returncode == 2
    assert done.stderr == "spmdrl: rank 1: unknown verb 'trian'; did you mean train?\n"


def test_a_failure_that_is_no_bad_input_keeps_its_traceback() -> None:
    failing_verb = """
import sys, types
from spmdrl.cli.command_line import main
sys.modules["spmdrl.observability.report.report"] = types.SimpleNamespace(main=lambda argv: 1 // 0)
raise SystemExit(main(["report", "runs/a"]))
"""
    done = python("-c", failing_verb)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


LOADED = "print([name for name in sys.modules if name.startswith(('torch', 'tensordict', 'transformers', 'numpy'))])"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("model: {path", "not valid YAML"),
        (None, "No such file"),
        ("- 1\n", "must hold a mapping"),
        ("optim: {lrr: 1e-5}\n", "did you mean optim.lr?"),
        ("optim: {lr: fast}\n", "optim.lr"),
        ("algo: {name: grpoo}\n", "grpo"),
    ],
)
def test_a_config_that_cant_be_read_is_refused_before_pytorch_is_imported(
    tmp_path: Path, text: str | None, refusal: str
) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    verbs = (["train"], ["launch", "slurm", "--ranks-per-node=1", "sft"])
    code = f"import sys; from spmdrl.cli.command_line import main; main(sys.argv[1:]); {LOADED}"
    for verb in verbs if text is None else verbs[:1]:
        refused = python("-c", code, *verb, "configs/debug/quickstart.yaml", str(path))
        assert refusal in refused.stderr and refused.stdout == "[]\n", refused.stderr


def test_a_shipped_config_is_read_without_pytorch_and_without_what_it_configures() -> None:
    code = "import sys; from pathlib import Path; from spmdrl.config.config import load_config; " + (
        "loaded = load_config([Path('configs/debug/quickstart.yaml')], [], 'train'); assert loaded.value.algo.name; "
    )
    read = python("-c", code + LOADED.replace("'numpy'", "'numpy', 'spmdrl.engines', 'spmdrl.dataflow', 'spmdrl.job'"))
    assert read.stdout == "[]\n", read.stderr

"""What was written for other trainers, trained here without a change to it: rewards before and after.

Functions and a class in TRL's form are those of docs/environments.md; SkyRL-gym, gymnasium and reasoning-gym must be
installed. Turns of the models that talk are among a few texts, each as likely as the others before training; models of
reasoning-gym's tasks have a supervised start. Glue is the lines that a run needs besides: a key of its config. Rewards
are the means of sampled rows over a tenth of the steps, the first and the last, and must rise.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from spmdrl.config.reader import ConfigError
from spmdrl.runtime.screen import show
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.train_runs import train_steps
from tests.bench.learning.recipes import Settings
from tests.support.chat_model import make_chat_model

_DOCUMENTED = Path(__file__).parents[3] / "docs" / "environments.md"


@dataclass(frozen=True)
class Source:
    """An environment or a task of others, and the run that trains on it."""

    setting: str
    """the key and value that name it; files of docs/environments.md, turns.jsonl and lake.py lie in FOLDER"""
    turns: Sequence[str] = ()
    """texts among which a turn of the model is; none where the model is made of letters"""
    settings: Settings = field(default_factory=dict)


def _call(name: str, **arguments: int) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _task(name: str, **parameters: int) -> Source:
    """A task of reasoning-gym; rows of one seed are made from it and the seeds after it, which evaluation's are not."""
    query = "&".join(f"{key}={value}" for key, value in {**parameters, "size": 4000}.items())
    return Source(f"data.train=reasoning_gym://{name}?{query}", settings=_SPELT)


# The registered lake is so large and slippery that a walk by chance ends well in one of seventy.
_LAKE = """
import gymnasium

class Lake(gymnasium.Wrapper):
    def __init__(self, render_mode=None):
        lake = gymnasium.make("FrozenLake-v1", desc=["SFF", "FHF", "FFG"], is_slippery=False, render_mode=render_mode)
        super().__init__(lake)
"""
_SUMS = "synthetic://addition?low=0&high=2&count=8"
_SHARED: Settings = {
    "data.train": _SUMS,
    "data.chat_template": "always",
    "reward.functions": "[exact]",
    "rollout.num_generations": 16,
    "rollout.max_running_rows": 256,
    "rollout.max_completion_length": 256,
    "optim.lr": 1.0e-3,
    "optim.betas": "[0.9, 0.95]",
    "eval.before_train": "false",
}
_SPELT: Settings = {
    "data.chat_template": "never",
    "model.make": "{hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 192, max_position_embeddings: 128}",
    "sft.max_steps": 400,
    "sft.rows_per_step": 64,
    "sft.stop_at_probability": 0.25,
    "sft.optim": "{lr: 3.0e-3, warmup_steps: 20, betas: [0.9, 0.95]}",
    "rollout.max_completion_length": 12,
    "reward.functions": "[reasoning_gym]",
    "optim.lr": 1.0e-3,
}
_ANSWERS = [str(number) for number in range(5)]
SOURCES: Mapping[str, Source] = {
    "TRL: tools": Source(
        "environment.tools=[FOLDER/sums.py:add]",
        [*(_call("add", a=a, b=b) for a in range(3) for b in range(3)), *_ANSWERS],
    ),
    "TRL: environment_factory": Source(
        "environment.factory=FOLDER/guessing.py:Guessing",
        [*(_call("guess", number=number) for number in range(5)), "So."],
    ),
    "SkyRL-gym: gsm8k": Source("environment.skyrl=gsm8k", [*(f"#### {answer}" for answer in _ANSWERS), "So."]),
    "SkyRL-gym: gsm8k_multi_turn": Source(
        "environment.skyrl=gsm8k_multi_turn",
        [*(f"#### {answer}" for answer in _ANSWERS), "So."],
        {"data.train": "FOLDER/turns.jsonl"},
    ),
    "gymnasium: FrozenLake-v1": Source(
        "environment.gymnasium=FOLDER/lake.py:Lake",
        ["0", "1", "2", "3"],
    ),
    "gymnasium: Blackjack-v1": Source("environment.gymnasium=Blackjack-v1", ["0", "1"]),
    "reasoning-gym: spell_backward": _task("spell_backward", min_word_len=3, max_word_len=4),
    "reasoning-gym: chain_sum": _task("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "reasoning-gym: letter_counting": _task("letter_counting", min_words=2, max_words=3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources_help = f"all unless given: {', '.join(SOURCES)}"
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), metavar="NAME", help=sources_help)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help="of a step, with 16 rows each")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train on each in turn. Raises ConfigError for one that isn't known, RuntimeError if a run fails."""
    unknown = [name for name in arguments.sources if name not in SOURCES]
    if unknown:
        raise ConfigError(f"--sources {unknown[0]!r} isn't one of {', '.join(SOURCES)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        for file, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", _DOCUMENTED.read_text(), re.DOTALL):
            (folder / file).write_text(text)
        sums = ({"prompt": f"{a}+{b}=", "answer": str(a + b), "max_turns": 3} for a in range(3) for b in range(3))
        (folder / "turns.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums))
        (folder / "lake.py").write_text(_LAKE)
        for number, source in enumerate(arguments.sources):
            rows.append(_trained(source, folder, folder / f"run{number}", arguments))
            show(f"{source}: {rows[-1]['before']:.3f} -> {rows[-1]['after']:.3f}", stream=sys.stderr)
    return BenchTable(
        title=f"bench sources: {arguments.ranks} ranks, {arguments.steps} steps",
        rows=rows,
        passed=all(row["after"] > row["before"] for row in rows),
    )


def _trained(name: str, folder: Path, run_folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    source = SOURCES[name]
    key, _, value = source.setting.partition("=")
    settings = {**_SHARED, **source.settings, key: value}
    settings |= {"train.max_steps": arguments.steps, "rollout.prompts_per_step": arguments.prompts}
    settings = {name: str(value).replace("FOLDER", str(folder)) for name, value in settings.items()}
    if source.turns:
        settings["model.path"] = make_chat_model(run_folder.with_suffix(".model"), source.turns, max_positions=4096)
    steps = train_steps(run_folder, settings, num_ranks=arguments.ranks)
    rewards = [step["reward"] for step in steps]
    tenth = max(1, len(rewards) // 10)
    return {"source": name, "glue": source.setting, "before": fmean(rewards[:tenth]), "after": fmean(rewards[-tenth:]),
            "turns": fmean(step.get("environment/turns", 1.0) for step in steps[-tenth:])}  # fmt: skip

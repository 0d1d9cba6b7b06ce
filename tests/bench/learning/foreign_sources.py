"""What was written for other trainers: environments, tools and tasks, and the runs that train on them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.learning.recipes import Settings
from tests.support.chat_model import make_chat_model

_DOCUMENTED = Path(__file__).parents[3] / "docs" / "environments.md"


@dataclass(frozen=True)
class Source:
    """An environment or a task of others, and the run that trains on it."""

    setting: str
    """the key and value that name it; PYTHON is the interpreter, and FOLDER has the files of `write_files`"""
    turns: Sequence[str] = ()
    """texts among which a turn of the model is; none where the model is made of letters"""
    settings: Settings = field(default_factory=dict)


def tool_call(name: str, **arguments: int) -> str:
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
# A row of verifiers is an interpreter that loads its harness, some two seconds of a core.
_HARNESS: Settings = {
    "data.train": "synthetic://addition?low=0&high=1&count=4",
    "rollout.prompts_per_step": 4,
    "rollout.num_generations": 4,
    "optim.lr": 3.0e-3,
}
ANSWERS = [str(number) for number in range(5)]
_CALLS_AND_ANSWERS = [*(tool_call("add", a=a, b=b) for a in range(3) for b in range(3)), *ANSWERS]
VERIFIERS = "verifiers: taskset"
SOURCES: Mapping[str, Source] = {
    "TRL: tools": Source("environment.tools=[FOLDER/sums.py:add]", _CALLS_AND_ANSWERS),
    "TRL: environment_factory": Source(
        "environment.factory=FOLDER/guessing.py:Guessing",
        [*(tool_call("guess", number=number) for number in range(5)), "So."],
    ),
    "SkyRL-gym: gsm8k": Source("environment.skyrl=gsm8k", [*(f"#### {answer}" for answer in ANSWERS), "So."]),
    "SkyRL-gym: gsm8k_multi_turn": Source(
        "environment.skyrl=gsm8k_multi_turn",
        [*(f"#### {answer}" for answer in ANSWERS), "So."],
        {"data.train": "FOLDER/turns.jsonl"},
    ),
    "gymnasium: FrozenLake-v1": Source("environment.gymnasium=FOLDER/lake.py:Lake", ["0", "1", "2", "3"]),
    "gymnasium: Blackjack-v1": Source("environment.gymnasium=Blackjack-v1", ["0", "1"]),
    "MCP: server": Source("environment.mcp=[PYTHON,FOLDER/server.py]", _CALLS_AND_ANSWERS),
    "OpenAI's API: program": Source(
        "environment.program=FOLDER/agent.py:two_tries", [*ANSWERS, "So."], {"rollout.prompts_per_step": 4}
    ),
    VERIFIERS: Source("environment.program=FOLDER/sums_v1.py:rollout", [*ANSWERS, "So."], _HARNESS),
    "reasoning-gym: spell_backward": _task("spell_backward", min_word_len=3, max_word_len=4),
    "reasoning-gym: chain_sum": _task("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "reasoning-gym: letter_counting": _task("letter_counting", min_words=2, max_words=3),
}


def write_files(folder: Path) -> None:
    """Write the files that settings name: those of docs/environments.md, turns.jsonl and lake.py."""
    for file, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", _DOCUMENTED.read_text(), re.DOTALL):
        (folder / file).write_text(text)
    sums = ({"prompt": f"{a}+{b}=", "answer": str(a + b), "max_turns": 3} for a in range(3) for b in range(3))
    (folder / "turns.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums))
    (folder / "lake.py").write_text(_LAKE)


def settings_of(source: Source, folder: Path, model: Path) -> dict[str, object]:
    """Settings of a source's run, whose files lie in `folder`; a model that talks is made in the folder `model`."""
    key, _, value = source.setting.partition("=")
    settings = {**_SHARED, **source.settings, key: value}
    if source.turns:
        settings["model.path"] = make_chat_model(model, source.turns, max_positions=4096)
    return {
        name: str(value).replace("FOLDER", str(folder)).replace("PYTHON", sys.executable)
        for name, value in settings.items()
    }

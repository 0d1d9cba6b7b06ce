"""How evenly ranks work: deals of log-normal lengths, and steps of two ranks with and without balance, in turn.

The deals are those of the product, in the cost of Qwen2.5-7B: groups to replicas, then rows to ranks. "By numbers" is
`dock.balance: rows`. Prompts are new (nothing is expected of them) or seen (once before). The steps are whole runs of a
small model that is made here, whose answers depend on their prompts alone: their mean length is log-normal over
prompts, and lengths of one prompt deviate by 0.35 of it. Only steps whose prompts were seen before are counted.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.engines.models.hf.model_folder import hf_config_dict
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.make_model import PRINTABLE_CHARS, RandomWeights, make_char_tokenizer
from tests.bench.harness.bench_models import qwen3
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import STEPS_OF_WARM_UP, train_steps
from tests.bench.samples.balance_deals import rows_of_table

LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 4), (16, 2), (16, 8), (32, 4), (32, 16), (64, 8), (64, 32))
"""numbers of ranks and nodes"""
LARGEST_SPREAD = 0.05
EOS, NUM_SPECIAL = 2, 4
NUM_CHAINS, NUM_LINKS = 10, 8
_LETTERS = [letter for letter in PRINTABLE_CHARS if not letter.isspace() and not letter.isdigit()]
CHAINS = [_LETTERS[start : start + NUM_LINKS] for start in range(0, NUM_CHAINS * NUM_LINKS, NUM_LINKS)]
"""An answer repeats each letter of the chain that its prompt begins, then ends."""
STAGES = ("step", "generation", "update")
IMBALANCE = "generation/imbalance"
_MEAN_LENGTH, _SIGMA, _STEPS_PER_EPOCH, _LOGIT = 40, 0.9, 2, 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=512, help="prompts of the step that is dealt")
    parser.add_argument("--group-size", type=int, default=16, help="responses to each of them")
    parser.add_argument("--rounds", type=int, default=3, help="how often real steps run in turn; 0: deals only")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a real step, with 8 responses each")
    parser.add_argument("--length", type=int, default=256, help="the longest response of a real step")
    parser.add_argument("--steps", type=int, default=4, help="real steps that are counted in each run")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Deal, then train. Raises RuntimeError with the end of a run's stderr if it fails."""
    rows = rows_of_table(arguments.groups, arguments.group_size, LAYOUTS)
    notes = [
        f"{arguments.groups} prompts x {arguments.group_size} responses; cross-node rows beside the fewest possible"
    ]
    details: dict[str, object] = {}
    if arguments.rounds:
        steps = measured_steps(arguments)
        medians = {name: _medians(of_name) for name, of_name in steps.items()}
        ratios = {name: medians["rows"][name] / medians["cost"][name] for name in STAGES}
        details = {"ratios": ratios, "medians": medians, "steps": steps}
        notes.append(
            "by numbers / by cost, 2 ranks: "
            + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            + f"; {IMBALANCE} {medians['rows'][IMBALANCE]:.2f} and {medians['cost'][IMBALANCE]:.2f}"
        )
    return BenchTable("bench balance", rows, tuple(notes), details, passed=all(map(_is_within_limits, rows)))


def _is_within_limits(row: Mapping[str, float]) -> bool:
    # Where no whole rows fill a node's takers to the brim, one more row leaves it.
    is_local = row["cross-node rows"] <= row["least possible"] + row["nodes"]
    return is_local and row["update, (max - min) / mean"] <= LARGEST_SPREAD


def measured_steps(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Seconds of each counted step, by what ranks get equal shares of."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        write_repeating_model(folder / "model")
        prompts = [f"{n}{CHAINS[n % NUM_CHAINS][0]}" for n in range(_STEPS_PER_EPOCH * arguments.prompts)]
        lines = [json.dumps({"prompt": prompt, "answer": "0"}) for prompt in prompts]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        runs = {balance: functools.partial(_train, arguments, folder, balance=balance) for balance in ("cost", "rows")}
        turns = in_turn(runs, arguments.rounds)
    return {name: [step for each in turn.results for step in each] for name, turn in turns.items()}


def write_repeating_model(folder: Path) -> None:
    """Make a model that repeats a letter or goes on with the next of its chain, each with a chance of its own.

    Embeddings are orthogonal and layers write nothing, so that the head decides by the last letter alone.
    """
    vocab_size, hidden_size = NUM_SPECIAL + len(PRINTABLE_CHARS), 256
    config = qwen3(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=768, num_layers=6, num_heads=4,
        num_kv_heads=2, head_size=64, tied_head=False,
    )  # fmt: skip
    head = torch.eye(vocab_size, hidden_size)
    for number, chain in enumerate(CHAINS):
        at = statistics.NormalDist().inv_cdf((number + 0.5) / NUM_CHAINS)
        odds = _MEAN_LENGTH * math.exp(_SIGMA * at) / NUM_LINKS
        ids = [*(NUM_SPECIAL + PRINTABLE_CHARS.index(letter) for letter in chain), EOS]
        for letter, following in itertools.pairwise(ids):
            head[following, letter] = 1 - math.log(odds) / _LOGIT
    weights = RandomWeights(config, seed=0)

    def weight(name: str) -> Tensor:
        if name.endswith("embed_tokens.weight"):
            return torch.eye(vocab_size, hidden_size)
        if name.endswith("lm_head.weight"):
            # The last norm makes the one component of an embedding the root of the width.
            return head * (_LOGIT / math.sqrt(hidden_size))
        random = weights(name)
        return random.zero_() if name.endswith(("o_proj.weight", "down_proj.weight")) else random

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config_dict(config, torch.float32) | {"eos_token_id": EOS}))
    make_char_tokenizer(folder)
    write_weights(folder, ((name, weight(name)) for name in weights.names))


def _train(arguments: argparse.Namespace, inputs: Path, *, balance: str) -> list[dict[str, float]]:
    settings = {
        "model.path": inputs / "model",
        "data.train": inputs / "prompts.jsonl",
        "rollout.prompts_per_step": arguments.prompts,
        "rollout.num_generations": 8,
        "rollout.max_completion_length": arguments.length,
        "train.max_steps": _STEPS_PER_EPOCH + arguments.steps,
        "resources.device": "cpu",
        "dock.balance": balance,
    }
    steps = train_steps(inputs / "run", settings, num_ranks=2)
    shutil.rmtree(inputs / "run")
    seen = steps[_STEPS_PER_EPOCH - STEPS_OF_WARM_UP :]
    return [{name: step[f"time/{name}"] for name in STAGES} | {IMBALANCE: step[IMBALANCE]} for step in seen]


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}

"""The paper's Table 3 as far as a small machine goes: whether `eval` can grade its sets' own answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from spmdrl.config.reader import start_up
from spmdrl.dataflow.data.data_rows import RowNeeds, read_rows
from spmdrl.engines.reward.calls import RewardCall
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.data_config import DataConfig
from spmdrl.nouns.settings.reward_config import RewardConfig
from tests.bench.harness.bench_table import BenchTable

# Name, the paper's measure, scores of MSRL and VeRL after 600 iterations, and the reward that grades it here.
SETS = (
    ("math500", "MATH500, pass@1", 85.7, 84.7, "math"),
    (None, "AIME24, avg@24", 23.7, 23.3, "math"),
    (None, "GPQA, avg@4", 47.4, 45.9, "choice"),
    ("gsm8k", "GSM8K", None, None, "number"),
)
_ROWS_OF_CALL = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option in filter(None, (name for name, *_ in SETS)):
        parser.add_argument(f"--{option}", type=Path, metavar="FILE", help=f"table3: {option}'s test rows, JSONL")


def table3(arguments: argparse.Namespace) -> BenchTable:
    """Grade the reference answers of the sets that are given. Passes if all rows have a reward."""
    rows: list[dict[str, object]] = []
    graded = []
    for option, measure, msrl, verl, reward in SETS:
        row: dict[str, object] = {"set": measure, "MSRL": msrl, "VeRL": verl, "reward": reward}
        rewards = None
        if option and (path := vars(arguments)[option]):
            rewards = _rewards_of_answers(path, reward)
            graded.append(f"{measure.split(',')[0]}: {rewards.count(1.0)} of {len(rewards)}")
        row |= {"rows": rewards and len(rewards), "reference answers right": rewards and rewards.count(1.0)}
        rows.append(row)
    return BenchTable(
        title="Table 3: sets that `spmdrl eval` grades; no scores of a trained 32B model",
        rows=rows,
        notes=(
            "The paper's scores are of Qwen2.5-32B after 600 iterations. Here the sets are read, and their own answers "
            "graded, to show that the harness works on them.",
            "A score: `spmdrl eval model.path=MODEL data.eval=FILE eval.num_samples=24` (accuracy is avg@24; pass@k by "
            "eval.pass_at).",
        ),
        details={"here": "answers graded right, " + ", ".join(graded) if graded else "no scores, no sets given"},
    )


def _rewards_of_answers(path: Path, reward: str) -> list[float | None]:
    """Each row's own answer, boxed as the prompts of such sets ask for it, through the reward processes."""
    with start_up():
        (source,) = read_rows(str(path), DataConfig(train=str(path)), needs=RowNeeds(answer=True))
    answers = [str(row.answer) for row in source.rows]
    texts = [f"\\boxed{{{answer}}}" if reward == "math" else answer for answer in answers]
    calls = {}
    for start in range(0, len(answers), _ROWS_OF_CALL):
        part = slice(start, start + _ROWS_OF_CALL)
        prompts = [row.prompt for row in source.rows[part]]
        calls[start] = RewardCall(prompts, texts[part], [[]] * len(prompts), {"answer": answers[part]})
    with RewardPool(RewardConfig(functions=(reward,))) as pool:
        pool.submit(calls)
        return [each for result in pool.collect(list(calls)) for each in result.rewards]

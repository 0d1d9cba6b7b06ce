"""Held-out prompts answered, scored and counted: for the `eval` verb, and during training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import Config, EvalConfig
from spmdrl.dataflow.samples.prompts import Prompt
from spmdrl.dataflow.stages.generation import run_requests
from spmdrl.dataflow.stages.partial import row_seed
from spmdrl.dataflow.stages.scoring import DecodeTokens, EndedResponses, StreamedRewards
from spmdrl.engines.generation.protocol import Request, Response, SamplingParams
from spmdrl.engines.reward.pool import RewardPool, RewardResult
from spmdrl.job.replica import Replica
from spmdrl.observability.statistics import Estimate, average_at_k, mean_pass_at_k, wilson
from spmdrl.resources.collectives import gather_bytes

# Keeps the random numbers of evaluations apart from those of rollouts.
EVALUATION_SEED_OFFSET = 1 << 40


@dataclass(frozen=True)
class Evaluation:
    """What held-out prompts scored; every rank holds the same."""

    num_prompts: int
    num_samples: int
    accuracy: Estimate
    """the share of answers with a reward of 1 or more: of greedy ones, or avg@k"""
    pass_at_k: Estimate | None
    mean_reward: float
    num_failed: int
    """answers without a reward; they count as wrong"""
    records: list[dict[str, Any]]
    """one a sample, in row order"""

    def described(self) -> str:
        text = f"{_shown(self.accuracy)}, {self.num_prompts} prompts"
        if self.pass_at_k is not None:
            text = f"avg@{self.num_samples} {text}, pass@{self.num_samples} {_shown(self.pass_at_k)}"
        return text + (f"; {self.num_failed} answers had no reward and count as wrong" if self.num_failed else "")


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} (95% {estimate.low:.3f}-{estimate.high:.3f})"


class Evaluator:
    """Answers held-out prompts with engines that are awake. Calling it is collective over all ranks."""

    def __init__(
        self, prompts: Sequence[Prompt], replica: Replica, pool: RewardPool, decode: DecodeTokens, *,
        config: EvalConfig, sampling: SamplingParams, seed: int,
    ):  # fmt: skip
        self.prompts = prompts[: config.max_rows]
        self.replica = replica
        self.rewards = StreamedRewards(pool, decode)
        self.decode = decode
        self.num_samples = config.num_samples
        self.num_rows = len(self.prompts) * config.num_samples
        self.sampling = sampling
        self.seed = seed

    def __call__(self) -> Evaluation:
        lines = [json.dumps(record) for record in self._own_records()]
        gathered = gather_bytes("\n".join(lines).encode())
        records = [json.loads(line) for part in gathered for line in part.decode().splitlines()]
        return evaluation_of(sorted(records, key=lambda record: record["row"]), self.num_samples)

    def _own_records(self) -> Iterator[dict[str, Any]]:
        numbers = self.replica.share_of(len(self.prompts))
        requests = [self._request(number) for number in numbers]
        answers: dict[int, dict[int, Response]] = {number: {} for number in numbers}
        for place, responses in run_requests(self.replica.engine, requests):
            number = numbers[place]
            ended = {response.row % self.num_samples: response for response in responses}
            answers[number] |= ended
            if self.replica.mesh.is_leader:
                self.rewards.begin(EndedResponses(_group(number), self.prompts[number], self.num_samples, ended))
        if not self.replica.mesh.is_leader:
            return
        results = self.rewards.collect([_group(number) for number in numbers])
        for (number, by_member), result in zip(answers.items(), results, strict=True):
            responses = [by_member[member] for member in range(self.num_samples)]
            yield from self._records(self.prompts[number], responses, result)

    def _request(self, number: int) -> Request:
        rows = tuple(range(number * self.num_samples, (number + 1) * self.num_samples))
        seeds = tuple(row_seed(self.seed, EVALUATION_SEED_OFFSET, row) for row in rows)
        return Request(rows, tuple(self.prompts[number].prompt_ids), seeds, self.sampling)

    def _records(self, prompt: Prompt, responses: Sequence[Response], result: RewardResult) -> Iterator[dict[str, Any]]:
        for position, response in enumerate(responses):
            yield {
                "row": response.row,
                "id": prompt.id,
                "prompt": prompt.text,
                "answer": prompt.answer,
                "response": self.decode(response.token_ids),
                "reward": result.rewards[position],
                "verdict": result.verdicts[position].name.lower(),
                "num_tokens": len(response.token_ids),
                "finish": response.finish,
            }


def _group(number: int) -> tuple[str, int]:
    """The group of a held-out prompt, apart from those of a rollout whose rewards the pool may still hold."""
    return "held out", number


def evaluation_of(records: list[dict[str, Any]], num_samples: int) -> Evaluation:
    """Statistics over records in row order, `num_samples` a prompt."""
    rewards = [record["reward"] for record in records]
    is_right = [reward is not None and reward >= 1.0 for reward in rewards]
    by_prompt = [is_right[start : start + num_samples] for start in range(0, len(records), num_samples)]
    usable = [reward for reward in rewards if reward is not None]
    sampled = num_samples > 1
    return Evaluation(
        num_prompts=len(by_prompt),
        num_samples=num_samples,
        accuracy=average_at_k(by_prompt) if sampled else wilson(sum(is_right), len(is_right)),
        pass_at_k=mean_pass_at_k([sum(group) for group in by_prompt], num_samples, num_samples) if sampled else None,
        mean_reward=sum(usable) / len(usable) if usable else float("nan"),
        num_failed=len(rewards) - len(usable),
        records=records,
    )


def evaluation_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Greedy for one answer a prompt; otherwise plain sampling at `eval.temperature`."""
    temperature = 0.0 if config.eval.num_samples == 1 else config.eval.temperature
    return SamplingParams(
        temperature=temperature,
        max_tokens=config.rollout.max_completion_length,
        stop_token_ids=stop_token_ids,
        stop_strings=config.rollout.stop,
    )


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

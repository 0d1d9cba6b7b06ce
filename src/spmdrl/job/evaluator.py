"""Evaluation of held-out prompts: responses, scores and statistics, for the `eval` verb and during training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config.config import Config, EvalConfig
from spmdrl.config.reader import ConfigError
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.reward import DecodeTokens, StreamedRewards, turns_record
from spmdrl.dataflow.stages.rollout.requests import EndedResponses, StopPoint, Turns, row_seed, run_rollout
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.model.replica import Replica
from spmdrl.job.start.prepared import Prepared
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.nouns.statistics import Estimate, average_at_k, interval_of, mean_over_prompts, mean_pass_at_k, wilson
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.jsonl import to_json, write_atomic
from spmdrl.observability.summary import AT_K
from spmdrl.observability.terminal.units import fixed
from spmdrl.resources.collectives import gather_and_agree
from spmdrl.runtime.supervision.stop_request import StopAgreed
from spmdrl.runtime.workers.call_pool import Unanswered

# Separates the random numbers of evaluations from those of rollouts.
EVALUATION_SEED_OFFSET = 1 << 40


ACCURACY_RULE = "share of answers with reward >= 1"


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation; equal on every rank."""

    num_prompts: int
    num_samples: int
    mean_reward: Estimate
    """mean over the prompts that have a reward"""
    accuracy: Estimate
    """share of responses with a reward of 1 or more: of greedy ones, or avg@k"""
    pass_at: Mapping[int, Estimate]
    """pass@k by k: the chance that at least one of k responses to a prompt has a reward of 1 or more"""
    is_verdict: bool
    """true if every reward is 0 or 1, so that the accuracy is one"""
    num_failed: int
    """number of responses without a reward; they count as wrong"""
    records: list[dict[str, Any]]
    """one per sample, in row order"""

    def described(self) -> str:
        """Describe mean reward and accuracy, with intervals; rewards beside 0 and 1 have a share instead."""
        text = f"mean reward {_shown(self.mean_reward)}, {self._share_text()}, {self.num_prompts} prompts"
        return text + (f"; {self.num_failed} answers had no reward and count as wrong" if self.num_failed else "")

    def fields(self) -> dict[str, Any]:
        """Return the fields for a summary; intervals are of 95%, null if unknown."""
        return {
            "mean_reward": self.mean_reward.value,
            "mean_reward_interval": interval_of(self.mean_reward),
            "accuracy": self.accuracy.value if self.is_verdict else None,
            "accuracy_interval": interval_of(self.accuracy) if self.is_verdict else None,
            "accuracy_rule": ACCURACY_RULE,
            "share_of_reward_1": self.accuracy.value,
            **self.pass_fields(),
            "num_prompts": self.num_prompts,
            "num_samples": self.num_samples,
            "num_failed": self.num_failed,
        }

    def pass_fields(self, when: str = "") -> dict[str, Any]:
        """Return each pass@k with its interval, as fields of a summary."""
        fields: dict[str, Any] = {}
        for k, estimate in self.pass_at.items():
            name = f"{AT_K}{k}{when}"
            fields |= {name: estimate.value, f"{name}_interval": interval_of(estimate)}
        return fields

    def _share_text(self) -> str:
        rule = f"{_shown(self.accuracy)} = {ACCURACY_RULE}"
        text = f"{f'avg@{self.num_samples} ' if self.num_samples > 1 else ''}accuracy {rule}"
        if not self.is_verdict:
            text = f"reward >= 1 in {_shown(self.accuracy)} of the answers (no accuracy: rewards aren't only 0 and 1)"
        return ", ".join([text, *(f"pass@{k} {_shown(estimate)}" for k, estimate in self.pass_at.items())])


def _shown(estimate: Estimate) -> str:
    ends = interval_of(estimate)
    return fixed(estimate.value, 3) + ("" if ends is None else f" (95% {fixed(ends[0], 3)} to {fixed(ends[1], 3)})")


class Evaluator:
    """Scorer of generated responses to held-out prompts; engines must be awake. Collective over all ranks.

    Raises StopAgreed on all of them if one was asked to stop, and ConfigError if the reward functions failed on one's
    first rows, before the others are generated.
    """

    def __init__(
        self, prompts: Sequence[Prompt], replica: Replica, pool: RewardPool | None, decode: DecodeTokens, *,
        config: EvalConfig, sampling: SamplingParams, seed: int, turns: Turns | None = None,
    ):  # fmt: skip
        """Ranks that don't generate have no `pool`."""
        self.prompts = prompts[: config.max_rows]
        self.replica = replica
        self._pool, self._error = pool, ""
        self.rewards = None if pool is None else StreamedRewards(pool, decode)
        self.decode = decode
        self.num_samples = config.num_samples
        self.passes = config.passes
        self.num_rows = len(self.prompts) * config.num_samples
        self.sampling = sampling
        self.seed = seed
        self.turns = turns

    def __call__(self) -> Evaluation:
        faultpoint("eval")
        self._error = ""
        lines = [json.dumps(record) for record in self._own_records()]
        gathered, stop_reason = gather_and_agree("\n".join([json.dumps(self._hopeless()), *lines]).encode())
        if stop_reason is not None:
            raise StopAgreed(stop_reason)
        own = [[json.loads(line) for line in part.decode().splitlines()] for part in gathered]
        if error := next((error for error, *_ in own if error), None):
            raise ConfigError(
                f"the reward failed on all of the first rows that were evaluated; the first failure: {error}; fix the "
                "reward function, or set reward.max_error_rate to 1"
            )
        records = [record for _, *records in own for record in records]
        return evaluation_of(sorted(records, key=lambda record: record["row"]), self.num_samples, self.passes)

    def _hopeless(self) -> str:
        """Return the error that ends the evaluation early; kept, as rows in progress may still be scored."""
        self._error = self._error or (self._pool and self._pool.hopeless()) or ""
        return self._error

    def _own_records(self) -> Iterator[dict[str, Any]]:
        if self.rewards is None:
            return
        numbers = self.replica.share_of(len(self.prompts))
        requests = [self._request(number) for number in numbers]
        answers: dict[int, dict[int, Response]] = {number: {} for number in numbers}
        prompts = [self.prompts[number] for number in numbers]
        stop = StopPoint(self.replica.mesh, self._hopeless)
        for by_request in run_rollout(self.replica.engine, requests, prompts, self.turns, stop):
            if stop.is_reached:
                return
            ended = []
            for place, responses in by_request.items():
                number = numbers[place]
                one = EndedResponses.of(_group(number), self.prompts[number], self.num_samples, responses)
                answers[number] |= one.by_member
                ended.append(one)
            if self.replica.mesh.is_leader:
                self.rewards.begin(ended)
        if not self.replica.mesh.is_leader:
            return
        if any(len(by_member) < self.num_samples for by_member in answers.values()):
            # The run is stopping, and didn't wait for an environment.
            return
        try:
            results = self.rewards.collect([_group(number) for number in numbers])
        except Unanswered:
            return
        for (number, by_member), result in zip(answers.items(), results, strict=True):
            prompt, responses = self.prompts[number], [by_member[member] for member in range(self.num_samples)]
            for position, response in enumerate(responses):
                yield {
                    "row": response.row,
                    "id": prompt.id,
                    "prompt": prompt.text,
                    "answer": prompt.answer,
                    "response": self.decode(response.token_ids),
                    "reward": result.rewards[position],
                    "verdict": result.verdicts[position].name.lower(),
                    "num_tokens": response.num_own_tokens,
                    "finish": response.finish,
                    **turns_record(response, self.decode),
                }

    def _request(self, number: int) -> Request:
        rows = tuple(range(number * self.num_samples, (number + 1) * self.num_samples))
        seeds = tuple(row_seed(self.seed, EVALUATION_SEED_OFFSET, row) for row in rows)
        return Request(rows, tuple(self.prompts[number].prompt_ids), seeds, self.sampling)


def _group(number: int) -> tuple[str, int]:
    """Return a held-out prompt's group, distinct from those of a rollout whose rewards the pool may still hold."""
    return "held out", number


def evaluation_of(records: list[dict[str, Any]], num_samples: int, passes: Sequence[int] = ()) -> Evaluation:
    """Compute statistics over records in row order, `num_samples` per prompt, with pass@k for each k of `passes`."""
    rewards = [record["reward"] for record in records]
    is_right = [reward is not None and reward >= 1.0 for reward in rewards]
    by_prompt = [is_right[start : start + num_samples] for start in range(0, len(records), num_samples)]
    usable = [reward for reward in rewards if reward is not None]
    is_verdict = set(usable) <= {0.0, 1.0}
    accuracy = average_at_k(by_prompt) if num_samples > 1 else wilson(sum(is_right), len(is_right))
    num_right = [sum(group) for group in by_prompt]
    # The mean of verdicts is their accuracy, whose distribution is known.
    is_same = is_verdict and len(usable) == len(rewards)
    return Evaluation(
        num_prompts=len(by_prompt),
        num_samples=num_samples,
        mean_reward=accuracy if is_same else mean_over_prompts(_means(rewards, num_samples)),
        accuracy=accuracy,
        # A single response passes as often as it is right.
        pass_at={k: mean_pass_at_k(num_right, num_samples, k) if k > 1 else accuracy for k in passes},
        is_verdict=is_verdict,
        num_failed=len(rewards) - len(usable),
        records=records,
    )


def _means(rewards: Sequence[float | None], num_samples: int) -> list[float]:
    """Return the mean reward of each prompt's rewarded responses."""
    groups = [rewards[start : start + num_samples] for start in range(0, len(rewards), num_samples)]
    usable = [[reward for reward in group if reward is not None] for group in groups]
    return [sum(reward / len(group) for reward in group) for group in usable if group]


def build_evaluator(
    config: Config, prepared: Prepared, replica: Replica, pool: RewardPool | None, turns: Turns | None
) -> Evaluator | None:
    """Build the evaluator of the held-out rows, or None without any.

    Greedy for one answer per prompt; otherwise plain sampling at `eval.temperature`.
    """
    if prepared.held_out is None:
        return None
    sampling = SamplingParams(
        temperature=0.0 if config.eval.num_samples == 1 else config.eval.temperature,
        max_tokens=config.rollout.max_completion_length,
        stop_token_ids=prepared.tokenizer.stop_token_ids,
        stop_strings=config.rollout.stop,
    )
    prompts, decode = list(prepared.held_out.all()), prepared.tokenizer.decode
    return Evaluator(
        prompts, replica, pool, decode, config=config.eval, sampling=sampling, seed=config.seed, turns=turns
    )


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one line per record; the file appears whole or not at all."""
    write_atomic(path, "".join(to_json(record) + "\n" for record in records))

"""Rollouts written to disk, and an engine that replays them instead of generating.

Fixes a policy's responses, so that the update can be compared across numbers of ranks or versions of the code. A step
has one safetensors file, or several parts of it: ranks that each write their own rows need no gather.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmdrl.engines.generation.protocol import Finish, Request, Response
from spmdrl.nouns.batch import offsets_of
from spmdrl.runtime.workers.verdict import Outcome, Verdict

_FINISHES: tuple[Finish, ...] = get_args(Finish)


def rollout_file(folder: Path, step: int, part: int = 0) -> Path:
    """Return the path of part `part` (such as a rank's) of a step's recorded rollouts."""
    return folder / f"step_{step:06d}.part_{part:05d}.safetensors"


def record_rollouts(path: Path, responses: Sequence[Response], prompts: Mapping[int, Sequence[int]]) -> None:
    """Write responses as packed columns, each with its row's prompt; the file appears whole or not at all."""
    columns = {
        "rows": torch.tensor([response.row for response in responses], dtype=torch.int64),
        "finish": torch.tensor([_FINISHES.index(response.finish) for response in responses], dtype=torch.uint8),
        "prompt_offsets": offsets_of([len(prompts[response.row]) for response in responses]),
        "prompt_ids": _packed((prompts[response.row] for response in responses), torch.int64),
        "offsets": offsets_of([len(response.token_ids) for response in responses]),
        "token_ids": _packed((response.token_ids for response in responses), torch.int64),
        "logprobs": _packed((response.logprobs for response in responses), torch.float64),
        "versions": _packed((response.versions for response in responses), torch.int64),
    }
    if any(response.turns is not None for response in responses):
        columns["turns"] = _packed((response.turns or () for response in responses), torch.int64)
        columns["turn_rewards"] = _packed((response.turn_rewards for response in responses), torch.float64)
        columns["outcome_reward"], columns["outcome_verdict"] = packed_outcomes(responses)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    try:
        save_file(columns, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_rollouts(path: Path) -> dict[int, tuple[tuple[int, ...], Response]]:
    """Return the prompt and the response of each row in a recorded file."""
    columns = load_file(path)
    token_ids, logprobs, versions = (
        _unpacked(columns[name], columns["offsets"]) for name in ("token_ids", "logprobs", "versions")
    )
    prompts = _unpacked(columns["prompt_ids"], columns["prompt_offsets"])
    turns: list[tuple[int, ...] | None] = [None] * len(columns["rows"])
    rewards: list[tuple[float, ...]] = [()] * len(turns)
    outcomes: list[Outcome | None] = [None] * len(turns)
    if "turns" in columns:
        turns = list(_unpacked(columns["turns"], columns["offsets"]))
        rewards = list(_unpacked(columns["turn_rewards"], columns["offsets"]))
        outcomes = unpacked_outcomes(columns["outcome_reward"], columns["outcome_verdict"])
    recorded = {}
    for index, (row, finish) in enumerate(zip(columns["rows"].tolist(), columns["finish"].tolist(), strict=True)):
        response = Response(
            row, token_ids[index], logprobs[index], _FINISHES[finish], versions[index], turns=turns[index],
            turn_rewards=rewards[index], outcome=outcomes[index],
        )  # fmt: skip
        recorded[row] = (prompts[index], response)
    return recorded


def packed_outcomes(responses: Sequence[Response]) -> tuple[Tensor, Tensor]:
    """Return reward and verdict of each row that an environment judged: NaN without a reward, -1 without a verdict."""
    outcomes = [response.outcome for response in responses]
    rewards = [float("nan") if one is None or one.reward is None else one.reward for one in outcomes]
    verdicts = [-1 if one is None else int(one.verdict) for one in outcomes]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(verdicts, dtype=torch.int32)


def unpacked_outcomes(rewards: Tensor, verdicts: Tensor) -> list[Outcome | None]:
    """Return the input of `packed_outcomes`, without the errors' texts."""
    return [
        None if verdict < 0 else Outcome(reward if Verdict(verdict).has_reward else None, Verdict(verdict))
        for reward, verdict in zip(rewards.tolist(), verdicts.tolist(), strict=True)
    ]


class ReplayEngine:
    """`AnsweringEngine` that serves a step's requests from the record of their rows.

    Call `begin_step` before the requests of each step.
    """

    def __init__(self, folder: Path, *, has_turns: bool = False):
        """`has_turns`: True if the run has an environment."""
        self.version = 0
        self._has_turns = has_turns
        self._folder = folder
        self._recorded: dict[int, tuple[tuple[int, ...], Response]] = {}
        self._pending: dict[int, Response] = {}
        self._step: int | None = None

    def begin_step(self, step: int) -> None:
        """Read the rollouts of a step; raises FileNotFoundError if none were recorded."""
        parts = sorted(self._folder.glob(f"step_{step:06d}.part_*.safetensors"))
        if not parts:
            raise FileNotFoundError(f"{self._folder} has no rollouts of step {step}; record it, or end the run sooner")
        self._step, self._recorded = step, {}
        for path in parts:
            recorded = read_rollouts(path)
            twice = recorded.keys() & self._recorded.keys()
            if twice:
                raise ValueError(
                    f"row {min(twice)} of step {step} is in {path} and in another file; remove the old one"
                )
            self._recorded.update(recorded)

    def submit(self, requests: Sequence[Request]) -> None:
        self._pending |= {row: self._answer(row, one.prompt_ids) for one in requests for row in one.rows}

    def _answer(self, row: int, prompt_ids: tuple[int, ...]) -> Response:
        if row not in self._recorded:
            raise ValueError(
                f"row {row} isn't among the {len(self._recorded)} rows recorded for step {self._step}; "
                "use the rollout.prompts_per_step and rollout.num_generations of the recorded run"
            )
        recorded_ids, response = self._recorded[row]
        if recorded_ids != prompt_ids:
            raise ValueError(
                f"row {row} of step {self._step} was recorded for another prompt, {list(recorded_ids[:8])}... instead "
                f"of {list(prompt_ids[:8])}...; use the data, tokenizer and seed of the recorded run"
            )
        if self._has_turns != (response.turns is not None):
            how = "without" if self._has_turns else "with"
            raise ValueError(
                f"row {row} of step {self._step} was recorded {how} an environment; use the environment of "
                "the recorded run"
            )
        return response

    @property
    def has_work(self) -> bool:
        return bool(self._pending)

    def step(self) -> list[Response]:
        responses = list(self._pending.values())
        self._pending.clear()
        return responses

    def abort(self) -> list[Response]:
        """Return the rows not served yet, without tokens."""
        rows = list(self._pending)
        self._pending.clear()
        return [Response(row, (), (), "aborted", ()) for row in rows]


def _packed(lists: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


def _unpacked(values: Tensor, offsets: Tensor) -> list[tuple[Any, ...]]:
    bounds, flat = offsets.tolist(), values.tolist()
    return [tuple(flat[start:stop]) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]

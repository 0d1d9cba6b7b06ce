"""What `replay` prints and writes of a row: the prompt, the reward's parts, its group, and each token in a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

from spmdrl.dataflow.stages.reward import DecodeTokens
from spmdrl.job.rollouts.row_records import RowDigests
from spmdrl.verbs.replaying.watched_stages import SeenRow

_COMPARED = {
    "length": "number of tokens",
    "tokens": "tokens",
    "logprobs": "generator's log-probs",
    "reward": "reward",
    "advantages": "advantages",
    "trainer": "trainer's log-probs",
    "loss": "loss terms",
}
_HEADER = (
    f"{'':5} {'id':>7} {'text':14} {'generator':>12} {'trainer':>12} {'advantage':>10} {'ratio':>9} {'loss':>11} "
    f"{'d loss/d lp':>11}"
)


@dataclass(frozen=True)
class TokenLine:
    """A token of a response; numbers are None where there are none, as of an environment's tokens."""

    token: int
    text: str
    generator: float | None = None
    """log-prob when it was drawn"""
    trainer: float | None = None
    """log-prob in the update"""
    advantage: float | None = None
    ratio: float | None = None
    """probability in the update / under the weights that the step began with"""
    loss: float | None = None
    """its term of the loss"""
    gradient: float | None = None
    """of the loss by the trainer's log-prob"""


@dataclass(frozen=True)
class RowComparison:
    """What was found of a row, in the run and again."""

    seen: SeenRow
    again: RowDigests | None
    """None where the row was left out before the update"""
    recorded: RowDigests | None

    @property
    def differences(self) -> list[str]:
        """What isn't the same to the bit; empty where nothing was recorded."""
        if self.recorded is None:
            return []
        if self.again is None:
            return ["whether the row is trained"]
        return [text for name, text in _COMPARED.items() if getattr(self.again, name) != getattr(self.recorded, name)]

    @property
    def verdict(self) -> str:
        if self.recorded is None:
            return "not compared: the run has no record of this row, which a step leaves out or an older version made"
        if differences := self.differences:
            return f"DIFFERS from what the run recorded: {', '.join(differences)}"
        same = [text for name, text in _COMPARED.items() if getattr(self.recorded, name) is not None]
        return f"the same to the bit as the run recorded: {', '.join(same)}"


def token_lines(seen: SeenRow, decode: DecodeTokens) -> list[TokenLine]:
    """A line for each token of the response."""
    own: Iterator[tuple[float | None, ...]] = iter(_numbers_of(seen))
    is_own = repeat(True) if seen.turns is None else (turn > 0 for turn in seen.turns)
    return [
        TokenLine(token, decode([token]), *(next(own) if written else ()))
        for token, written in zip(seen.token_ids, is_own, strict=False)
    ]


def _numbers_of(seen: SeenRow) -> Iterator[tuple[float | None, ...]]:
    """The numbers of each token that the model wrote, in the order of TokenLine's fields."""
    trained = seen.trained
    columns: list[Sequence[float] | None] = [seen.logprobs, None, seen.advantages, None, None, None]
    if trained is not None:
        ratios = trained.ratios or [1.0] * len(trained.losses)
        columns = [seen.logprobs, trained.logprobs, seen.advantages, ratios, trained.losses, trained.gradients or None]
    for place in range(len(seen.logprobs)):
        yield tuple(None if column is None else column[place] for column in columns)


def page(step: int, found: RowComparison, decode: DecodeTokens) -> str:
    """The row as text for a terminal."""
    seen = found.seen
    end = "ended" if seen.is_finished else "cut at rollout.max_completion_length"
    parts = ", ".join(f"{name} {value:.6g}" for name, value in seen.parts.items())
    group = " ".join(
        f"[{value:.6g}]" if row == seen.row else f"{value:.6g}" for row, value in seen.group_rewards.items()
    )
    lines = [
        f"step {step}, row {seen.row}",
        f"  prompt    {seen.prompt!r}" + (f", answer {seen.answer!r}" if seen.answer else ""),
        f"  response  {decode(seen.token_ids)!r}, {len(seen.token_ids)} tokens, {end}, "
        f"of policy version {', '.join(map(str, sorted(set(seen.versions))))}",
        f"  reward    {seen.reward:.6g} ({seen.verdict}): {parts}",
        f"  group     {group}",
    ]
    if seen.advantages is None:
        lines.append("  the step left the row out: no advantage, no loss")
    elif seen.trained is None:
        lines.append("  the update left the row out: its advantage is 0, or only the critic is trained yet")
    lines += ["", _HEADER, *(_line(place, token) for place, token in enumerate(token_lines(seen, decode)))]
    return "\n".join([*lines, "", f"  {found.verdict}", ""])


def _line(place: int, token: TokenLine) -> str:
    def number(value: float | None, width: int, form: str) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    return (
        f"{place:5} {token.token:7} {token.text!r:14.14} {number(token.generator, 12, '.7f')} "
        f"{number(token.trainer, 12, '.7f')} {number(token.advantage, 10, '.5f')} {number(token.ratio, 9, '.6f')} "
        f"{number(token.loss, 11, '.4e')} {number(token.gradient, 11, '.4e')}"
    ).rstrip()


def as_json(step: int, found: RowComparison, decode: DecodeTokens) -> dict[str, Any]:
    """The same for other programs."""
    seen: Mapping[str, Any] = asdict(found.seen)
    kept = ("row", "prompt", "answer", "turns", "is_finished", "versions", "reward", "verdict", "parts")
    return {
        "step": step,
        **{name: seen[name] for name in kept},
        "group_rewards": {str(row): value for row, value in found.seen.group_rewards.items()},
        "response": decode(found.seen.token_ids),
        "tokens": [asdict(line) for line in token_lines(found.seen, decode)],
        "is_recorded": found.recorded is not None,
        "differences": found.differences,
    }

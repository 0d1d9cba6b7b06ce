"""The report's section of replayed rows: prompt, parts of the reward, group, and a line per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from spmdrl.observability.report.page import Parts, Section, Table


@dataclass(frozen=True)
class ReplayedToken:
    """A token of a response; missing numbers are None, as for an environment's tokens."""

    token: int
    text: str
    generator: float | None = None
    """log-prob when drawn"""
    trainer: float | None = None
    """log-prob in the update"""
    advantage: float | None = None
    ratio: float | None = None
    """probability in the update / under the step's first weights"""
    loss: float | None = None
    """its term of the loss"""
    gradient: float | None = None
    """gradient of the loss by the trainer's log-prob"""


@dataclass(frozen=True)
class ReplayedRow:
    """A step's values for one row, and their comparison with the run's record."""

    step: int
    row: int
    prompt: str
    answer: str | None
    response: str
    turns: list[int] | None
    is_finished: bool
    versions: list[int]
    reward: float
    verdict: str
    parts: dict[str, float]
    group_rewards: dict[int, float]
    """rewards of the prompt's responses, by row"""
    left_out: str
    """reason why the row has no loss; empty if it has one"""
    tokens: list[ReplayedToken]
    is_recorded: bool = False
    differences: Sequence[str] = ()
    """names of values that differ from the run's"""
    same: Sequence[str] = ()
    """names of values that are bit-identical"""

    @property
    def comparison(self) -> str:
        if not self.is_recorded:
            return "not compared: the run has no record of this row, which a step leaves out or an older version made"
        if self.differences:
            return f"DIFFERS from what the run recorded: {', '.join(self.differences)}"
        return f"the same to the bit as the run recorded: {', '.join(self.same)}"

    @property
    def facts(self) -> dict[str, str]:
        """The row in a few lines, without its tokens."""
        end = "ended" if self.is_finished else "cut at rollout.max_completion_length"
        versions = ", ".join(map(str, sorted(set(self.versions))))
        parts = ", ".join(f"{name} {value:.6g}" for name, value in self.parts.items())
        group = (f"[{one:.6g}]" if row == self.row else f"{one:.6g}" for row, one in self.group_rewards.items())
        return {
            "prompt": repr(self.prompt) + (f", answer {self.answer!r}" if self.answer else ""),
            "response": f"{self.response!r}, {len(self.tokens)} tokens, {end}, of policy version {versions}",
            "reward": f"{self.reward:.6g} ({self.verdict}): {parts}",
            "group": " ".join(group),
        } | ({"loss": f"none: {self.left_out}"} if self.left_out else {})


def replay_section(rows: Sequence[ReplayedRow]) -> Section:
    """Return the facts and tokens of each row; there is one at least."""
    head, parts = (
        ("", "id", "text", "generator", "trainer", "advantage", "ratio", "loss", "d loss / d log-prob"),
        Parts(),
    )
    for row in rows:
        parts.append(Table(("", ""), list(row.facts.items()), title=f"Row {row.row}", note=row.comparison))
        parts.append(Table(head, [_cells(place, token) for place, token in enumerate(row.tokens)]))
    return Section("replay", f"Step {rows[0].step} again", parts)


def _cells(place: int, token: ReplayedToken) -> list[object]:
    number, text, *values = astuple(token)
    return [place, number, repr(text), *("" if value is None else f"{value:.7g}" for value in values)]

"""Which teacher a run's policy is drawn to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen model that rates the policy's responses; of any size, with the policy's tokens."""

    path: str
    """folder of a Hugging Face model or of a run, whose newest checkpoint it is, or a hub name; its tokenizer must have
    the policy's tokens"""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("teacher.path is empty; give a model folder or hub name")

"""Which teacher a run's policy is drawn to, and what it sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TeacherConfig:
    """A model that rates the policy's responses: a frozen one of any size, or the policy itself with more to go by."""

    path: str | None = None
    """folder of a Hugging Face model or of a run, whose newest checkpoint it is, or a hub name; its tokenizer must have
    the policy's tokens; null: the policy itself, with the weights that each step begins with"""
    prompt_column: str | None = None
    """column of the data with the teacher's prompt, text or messages, which may hold more than the policy's, such as
    the solution; null: the policy's prompt"""

    def __post_init__(self) -> None:
        if self.path is None and self.prompt_column is None:
            raise ValueError(
                "teacher has neither path nor prompt_column, so that it would be the policy itself and teach nothing; "
                "set teacher.path to a model, or teacher.prompt_column to a column of the data"
            )
        if self.path is not None and not self.path.strip():
            raise ValueError("teacher.path is empty; give a model folder or hub name")

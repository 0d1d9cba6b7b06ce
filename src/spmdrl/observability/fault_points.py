"""Named points at which tests make a rank fail, by a hook that is None in users' runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

hook: Callable[..., None] | None = None


def faultpoint(name: str, *values: Any) -> None:
    """Call the hook, if any, with values that it may corrupt: tensors, or a file's path.

    The point `step` gets a step's number wherever a thread begins another step.
    """
    if hook is not None:
        hook(name, *values)

"""An accelerator that needs no hardware: memory out of the host's reach, streams that run late, a check for races.

It computes with the CPU's kernels, so its results are the CPU's to the bit. docs/accelerators.md describes what it
simulates and what it can't.
"""

from __future__ import annotations

from tests.support.simulated_accelerator.compiling import why_not
from tests.support.simulated_accelerator.registering import install

__all__ = ["install", "why_not"]

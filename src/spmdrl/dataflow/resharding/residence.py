"""Place of the training state during generation: on the device beside generation's, or on the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from spmdrl.nouns.settings.flow_config import SwapMode

_GIB = 1 << 30


@dataclass(frozen=True)
class StateBytes:
    """Largest bytes on a rank, by kind."""

    models: int
    """weights and optimizer state of all roles"""
    gradients: int
    """gradients of the largest trained model: one is updated at a time"""
    generation_weights: int
    """generation weights that it lacks during updates"""
    kv_cache: int
    """KV cache of all rows generated at once"""
    bucket: int
    kept: int = 0
    """generation weights that stay during updates"""
    program: int = 0
    """interpreter and libraries, if they share the memory"""

    @property
    def together(self) -> int:
        """Largest sum at one time if nothing is swapped, without activations.

        Gradients end with the update, before generation takes its memory.
        """
        generation = self.generation_weights + self.kv_cache + self.bucket
        return self.program + self.models + self.kept + max(self.gradients, generation)


@dataclass(frozen=True)
class Residence:
    """A run's decision, from numbers that all ranks agreed on."""

    mode: SwapMode
    needed_bytes: int
    """bytes needed on the fullest rank if nothing is swapped"""
    room_bytes: int
    """bytes of room on the rank with the least"""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.room_bytes

    @property
    def swaps(self) -> bool:
        return self.mode == "always" or (self.mode == "auto" and not self.fits)

    @property
    def sentence(self) -> str:
        """Decision with figures, such as `swap: never needed, 3.1 of 22 GiB`."""
        figures = f"{self.needed_bytes / _GIB:.1f} of {self.room_bytes / _GIB:.1f} GiB"
        if self.mode == "auto":
            return f"swap: never needed, {figures}" if self.fits else f"swap: at every switch, else {figures}"
        if self.mode == "always":
            return f"swap: at every switch, as reshard.swap is always (else {figures})"
        warning = "" if self.fits else "WARNING: "
        return f"{warning}swap: never, as reshard.swap is never ({figures})"

    @property
    def summary(self) -> dict[str, object]:
        return {**asdict(self), "swaps": self.swaps}

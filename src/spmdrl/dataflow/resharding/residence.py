"""Where the training state is while responses are generated: on the device beside generation's, or on the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from spmdrl.nouns.settings.flow_config import SwapMode

_GIB = 1 << 30


@dataclass(frozen=True)
class StateBytes:
    """What a rank holds, in bytes, at the most."""

    models: int
    """weights and optimizer state of all roles"""
    gradients: int
    """of the largest trained model: one is updated at a time"""
    generation_weights: int
    """those that it lacks during updates"""
    kv_cache: int
    """for all rows that are generated at once"""
    bucket: int
    kept: int = 0
    """generation weights that stay during updates, too"""
    program: int = 0
    """what isn't the model: interpreter and libraries, where they live in the same memory"""

    @property
    def together(self) -> int:
        """The most at one time if nothing is swapped, without activations.

        Gradients end with the update, before generation takes its memory.
        """
        generation = self.generation_weights + self.kv_cache + self.bucket
        return self.program + self.models + self.kept + max(self.gradients, generation)


@dataclass(frozen=True)
class Residence:
    """The decision of a run, of numbers that all ranks have agreed on."""

    mode: SwapMode
    needed_bytes: int
    """on the fullest rank, if nothing is swapped"""
    room_bytes: int
    """on the rank with the least, for all of that"""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.room_bytes

    @property
    def swaps(self) -> bool:
        return self.mode == "always" or (self.mode == "auto" and not self.fits)

    @property
    def sentence(self) -> str:
        """The decision and its figures, such as `swap: never needed, 3.1 of 22 GiB`."""
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

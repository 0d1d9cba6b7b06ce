"""Names of stacked expert weights: one tensor a layer in the decoder, one tensor an expert in Hugging Face files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

_OF_ONE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)\.weight")
_STACKED = re.compile(r"(.*\.mlp\.experts)\.((?:gate|up|down)_proj)")


def is_stacked(name: str) -> bool:
    """Whether this is the decoder's name of one weight of all experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def expert_name(stacked: str, expert: int) -> str:
    """The files' name of one expert's part of a stacked weight."""
    match = _STACKED.fullmatch(stacked)
    assert match is not None, f"{stacked} is not the name of a stacked weight"
    return f"{match[1]}.{expert}.{match[2]}.weight"


def count_experts(names: Iterable[str]) -> dict[str, int]:
    """How many experts each stacked weight has in these files' names; raises ValueError where a number is left out."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        if match := _OF_ONE.fullmatch(name):
            numbers.setdefault(f"{match[1]}.{match[3]}", []).append(int(match[2]))
    for stacked, found in numbers.items():
        if sorted(found) != list(range(len(found))):
            lacking = min(set(range(len(found))) - set(found))
            raise ValueError(f"{expert_name(stacked, lacking)} is missing beside {len(found)} other experts of it")
    return {stacked: len(found) for stacked, found in numbers.items()}


def is_of_one_expert(name: str) -> bool:
    """Whether this is the files' name of a weight of a single expert."""
    return _OF_ONE.fullmatch(name) is not None


def unstack(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Give each weight under the files' names: stacked ones as views of their experts."""
    for name, weight in weights:
        if is_stacked(name):
            yield from ((expert_name(name, number), part) for number, part in enumerate(weight.unbind()))
        else:
            yield name, weight

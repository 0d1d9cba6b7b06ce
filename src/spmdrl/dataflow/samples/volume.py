"""Bytes that the sample flow moves, by link, and the paper's estimates for the same run (arXiv:2507.19017)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Link(enum.Enum):
    """How far a warehouse is from the rank that puts or gets."""

    PROCESS = "process"
    NODE = "node"
    CROSS_NODE = "cross_node"


@dataclass
class Volume:
    """Counts payload bytes by link, and the bytes of metadata that this rank received."""

    put_bytes: dict[Link, int] = field(default_factory=lambda: dict.fromkeys(Link, 0))
    get_bytes: dict[Link, int] = field(default_factory=lambda: dict.fromkeys(Link, 0))
    metadata_bytes: int = 0

    def payload_bytes(self, link: Link) -> int:
        return self.put_bytes[link] + self.get_bytes[link]

    def since(self, earlier: Volume) -> Volume:
        """What was moved after `earlier`, a copy taken before."""
        return Volume(
            {link: count - earlier.put_bytes[link] for link, count in self.put_bytes.items()},
            {link: count - earlier.get_bytes[link] for link, count in self.get_bytes.items()},
            self.metadata_bytes - earlier.metadata_bytes,
        )

    def copy(self) -> Volume:
        return Volume(dict(self.put_bytes), dict(self.get_bytes), self.metadata_bytes)


@dataclass(frozen=True)
class FlowShape:
    """The sizes in the paper's equations; its letters are in brackets."""

    num_prompts: int
    """Prompts in a global batch (G)."""
    responses_each: int
    """Responses a prompt (N)."""
    max_prompt_length: int
    """Tokens (PL)."""
    max_response_length: int
    """Tokens (SL)."""
    num_response_items: int
    """Items as long as a response, such as old and reference log-probs (n)."""
    num_scalars: int
    """Scalars a sample, such as its index and length (M)."""
    item_bytes: int = 4
    """Bytes of one value (B)."""

    @property
    def _row_items_gib(self) -> float:
        return self.num_prompts * self.responses_each * self.item_bytes / 1024**3


def request_gib(flow: FlowShape) -> float:
    """GiB of one worker's request to a central replay buffer (Eq. 1)."""
    items = flow.max_prompt_length + flow.num_response_items * flow.max_response_length + flow.num_scalars
    return flow._row_items_gib * items


def replay_buffer_gib(flow: FlowShape) -> float:
    """GiB through a central replay buffer in one step (Eq. 2)."""
    responses = 3 * flow.num_response_items * flow.max_response_length
    return flow._row_items_gib * (2 * flow.max_prompt_length + responses + 8 * flow.num_scalars)


def warehouse_gib(flow: FlowShape, *, num_controllers: int, num_warehouses: int) -> float:
    """GiB through each warehouse of a transfer dock in one step (Eq. 4, its C controllers and S warehouses)."""
    responses = 3 * flow.num_response_items * flow.max_response_length
    scalars = 8 * (num_controllers + 1) * flow.num_scalars
    return flow._row_items_gib * (2 * flow.max_prompt_length + responses + scalars) / num_warehouses

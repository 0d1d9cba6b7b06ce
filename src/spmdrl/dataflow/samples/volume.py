"""Bytes that the sample flow moves, by link and column, and the paper's estimates of them (arXiv:2507.19017)."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spmdrl.dataflow.samples.schema import RULES
from spmdrl.nouns.batch import Batch, WorkerState


class Link(enum.Enum):
    """Distance of a warehouse from the rank that puts or gets."""

    PROCESS = "process"
    NODE = "node"
    CROSS_NODE = "cross_node"


def column_bytes(batch: Batch) -> dict[str, int]:
    """Count the bytes of each column: its values, and its offsets if it is ragged."""
    return {
        name: values.nbytes + (batch.offsets(name).nbytes if batch.is_ragged(name) else 0)
        for name, values in batch.columns.items()
    }


def _no_bytes() -> dict[Link, Counter[str]]:
    return {link: Counter() for link in Link}


def _add_to(counts: Counter[str], more: Mapping[str, int]) -> None:
    # Counter.update without its type checks.
    for name, num_bytes in more.items():
        counts[name] += num_bytes


@dataclass
class Volume:
    """Bytes of payload that this rank puts and gets, and of metadata that it receives."""

    put_bytes: dict[Link, Counter[str]] = field(default_factory=_no_bytes)
    """Bytes by link, then by column; columns not put over a link are absent."""
    get_bytes: dict[Link, Counter[str]] = field(default_factory=_no_bytes)
    metadata_bytes: int = 0

    def count_put(self, link: Link, bytes_by_column: Mapping[str, int]) -> None:
        _add_to(self.put_bytes[link], bytes_by_column)

    def count_get(self, link: Link, bytes_by_column: Mapping[str, int]) -> None:
        _add_to(self.get_bytes[link], bytes_by_column)

    def payload_bytes(self, link: Link) -> int:
        return self.put_bytes[link].total() + self.get_bytes[link].total()

    def since(self, earlier: Volume) -> Volume:
        """Return the volume after `earlier`, a copy taken before."""
        return Volume(
            {link: count - earlier.put_bytes[link] for link, count in self.put_bytes.items()},
            {link: count - earlier.get_bytes[link] for link, count in self.get_bytes.items()},
            self.metadata_bytes - earlier.metadata_bytes,
        )

    def copy(self) -> Volume:
        return Volume(
            {link: count.copy() for link, count in self.put_bytes.items()},
            {link: count.copy() for link, count in self.get_bytes.items()},
            self.metadata_bytes,
        )


@dataclass(frozen=True)
class FlowShape:
    """Sizes in the paper's equations, with its letters in parentheses."""

    num_prompts: int
    """Prompts in a global batch (G)."""
    responses_each: int
    """Responses per prompt (N)."""
    max_prompt_length: int
    """Tokens (PL)."""
    max_response_length: int
    """Tokens (SL)."""
    num_response_items: int
    """Items as long as a response, such as old and reference log-probs (n)."""
    num_scalars: int
    """Scalars per sample, such as its index and length (M)."""
    item_bytes: int = 4
    """Bytes of one value (B)."""

    @classmethod
    def of_states(
        cls, states: Iterable[WorkerState], *, num_prompts: int, responses_each: int,
        max_prompt_length: int, max_response_length: int,
    ) -> FlowShape:  # fmt: skip
        """Return the shape of a flow with these worker states: n and M are the columns that they make.

        Besides its scalar columns, a row has its index and its response's length. Columns of other lengths, such as
        routed experts, aren't in the paper's equations.
        """
        makers = set(states)
        made = [rule for rule in RULES if rule.made_by in makers and rule.is_always_made]
        num_items = sum("response_ids" in (rule.name, rule.length_of) for rule in made)
        num_scalars = 2 + sum(not rule.column.ragged for rule in made)
        return cls(num_prompts, responses_each, max_prompt_length, max_response_length, num_items, num_scalars)

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

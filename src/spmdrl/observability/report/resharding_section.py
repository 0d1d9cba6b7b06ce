"""The table of resharding: the bytes that went over each link, and their rate."""

from __future__ import annotations

from collections.abc import Sequence

from spmdrl.observability.report.page import Parts, Table, value_text
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.observability.timeline.timeline import Moved, TimelineRecords

LINK_TEXTS = {"node": "same node", "cross_node": "across nodes", "to_host": "to the host", "from_host": "from the host"}


def link_text(link: str) -> str:
    """The link's name in the report; one that isn't listed keeps its own."""
    return LINK_TEXTS.get(link, link)


def moved_by_link(records: TimelineRecords) -> Parts:
    """One row per link that weights and optimizer state went over: bytes of the run and of a step, and rates."""
    by_link: dict[str, dict[int, list[Moved]]] = {}
    steps = {span.step for span in records.spans if span.moved}
    for span in records.spans:
        for moved in span.moved:
            by_link.setdefault(moved.link, {}).setdefault(span.rank, []).append(moved)
    known = [link for link in LINK_TEXTS if link in by_link]
    lines = [_line(link, by_link[link], len(steps)) for link in [*known, *sorted(by_link.keys() - set(known))]]
    note = (
        f"Of {len(steps)} steps and all ranks. A rate is that of one rank: between ranks while weights moved, to the "
        "host in all of a switch, from the host in the time of the copy."
    )
    head = ("link", "moved", "per step", "GB/s, mean", "GB/s, slowest rank")
    return [Table(head, lines, "Resharding by link", note)] if lines else []


def _line(link: str, moved_by_rank: dict[int, list[Moved]], num_steps: int) -> list[str]:
    total = _together(link, [one for moved in moved_by_rank.values() for one in moved])
    rate_of = {rank: _together(link, moved).gb_per_second for rank, moved in moved_by_rank.items()}
    slowest = min(rate_of, key=rate_of.__getitem__)
    return [
        link_text(link), bytes_text(total.num_bytes), bytes_text(total.num_bytes / num_steps),
        value_text(total.gb_per_second), f"{value_text(rate_of[slowest])} (rank {slowest})",
    ]  # fmt: skip


def _together(link: str, moved: Sequence[Moved]) -> Moved:
    """The sum of transfers over one link; its rate is their mean, weighted by time."""
    return Moved(link, sum(one.num_bytes for one in moved), sum(one.seconds for one in moved))

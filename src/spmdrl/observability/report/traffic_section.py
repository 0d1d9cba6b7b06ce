"""Tables of moved bytes: samples by column and link, with the paper's estimates, and resharding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spmdrl.observability.jsonl import number
from spmdrl.observability.report.page import Parts, Table, value_text
from spmdrl.observability.report.run_files import RunData
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.observability.timeline import Moved, TimelineRecords

LINKS = {
    "same process": "dock/bytes_process",
    "same node": "dock/bytes_node",
    "across nodes": "dock/bytes_cross_node",
}
"""metrics of sample bytes by link"""
LINK_TEXTS = {"node": "same node", "cross_node": "across nodes", "to_host": "to the host", "from_host": "from the host"}
# (label, prefix of the metrics of its columns and links)
OPERATIONS = {"put": "dock/put_bytes/", "got": "dock/get_bytes/"}
METADATA = "dock/metadata_bytes"
GIB = 1024**3

Way = tuple[str, str]
"""Operation and link, as shown."""
BytesByColumn = Counter[tuple[str, Way]]
"""Bytes by column and way."""


def sample_flow(run: RunData) -> Parts:
    """Return tables of the run's moved bytes, and a step's mean beside the paper's equations."""
    moved = moved_bytes(run)
    if not moved:
        return []
    steps = max(1, sum(any(name in values for name in LINKS.values()) for values in run.metrics.values()))
    metadata = _total(run, METADATA)
    note = f"Sample bytes of {steps} steps by column and link; besides, {bytes_text(metadata)} of metadata."
    estimates = run.summary.get("sample_flow")
    beside = _beside_estimates(estimates, moved, metadata, steps) if isinstance(estimates, Mapping) else []
    return [_by_column(moved, note), *beside]


def moved_bytes(run: RunData) -> BytesByColumn:
    """Sum bytes over all steps, from metrics dock/{put,get}_bytes/COLUMN/LINK."""
    link_of = {metric.removeprefix("dock/bytes_"): link for link, metric in LINKS.items()}
    moved: BytesByColumn = Counter()
    for name in run.metric_names:
        for operation, prefix in OPERATIONS.items():
            column, _, link = name.removeprefix(prefix).partition("/")
            if name.startswith(prefix) and link in link_of:
                moved[column, (operation, link_of[link])] += _total(run, name)
    return moved


def _total(run: RunData, metric: str) -> int:
    return round(sum(value for _, value in run.points(metric) if math.isfinite(value)))


def _by_column(moved: BytesByColumn, note: str) -> Table:
    """Return a table with a row per column, the heaviest first, and one for all."""
    used = {way for _, way in moved}
    ways = [way for link in LINKS for operation in OPERATIONS if (way := (operation, link)) in used]
    totals: Counter[str] = Counter()
    for (column, _), amount in moved.items():
        totals[column] += amount
    heaviest_first = sorted(totals, key=lambda column: (-totals[column], column))
    lines = {column: [moved[column, way] for way in ways] for column in heaviest_first}
    lines["all columns"] = [sum(amounts) for amounts in zip(*lines.values(), strict=True)]
    head = ["column", *(f"{operation}, {link}" for operation, link in ways), "moved"]
    rows = [
        [name, *(bytes_text(amount) if amount else "" for amount in (*amounts, sum(amounts)))]
        for name, amounts in lines.items()
    ]
    return Table(head, rows, note=note)


def _beside_estimates(estimates: Mapping[str, Any], moved: BytesByColumn, metadata: int, steps: int) -> Parts:
    """Show a step's mean bytes beside Eq. 1, 2 and 4, which count every prompt and response at its greatest length."""
    known = {name: amount for name, value in estimates.items() if (amount := number(value)) is not None}
    warehouses = max(known.get("num_warehouses", 1.0), 1.0)
    put = sum(amount for (_, (operation, _)), amount in moved.items() if operation == "put")
    payload = sum(moved.values())
    rows: Sequence[tuple[str, str, float]] = (
        ("Eq. 1: one request for the whole batch; measured: all that was put", "eq1_gib", put),
        ("Eq. 2: all requests to one central buffer; measured: all payload", "eq2_gib", payload),
        ("Eq. 4: through each warehouse; measured: payload and metadata", "eq4_gib", (payload + metadata) / warehouses),
    )
    lines = [
        (what, value_text(known[name]), value_text(moved), value_text(moved / known[name]) if known[name] > 0 else "")
        for what, name, moved in ((what, name, measured / steps / GIB) for what, name, measured in rows)
        if name in known
    ]
    sizes = ", ".join(f"{name} {value_text(amount)}" for name, amount in known.items() if not name.startswith("eq"))
    note = f"The paper's estimates pad every row to the greatest lengths: {sizes}."
    head = ("per step", "estimate, GiB", "measured, GiB", "measured / estimate")
    return [Table(head, lines, note=note)] if lines else []


def link_text(link: str) -> str:
    """Return the link's name in the report; one that isn't listed keeps its own."""
    return LINK_TEXTS.get(link, link)


def moved_by_link(records: TimelineRecords) -> Parts:
    """Return a table with a row per resharding link: bytes of the run and of a step, and rates."""
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
    """Return the sum of transfers over one link; its rate is their mean, weighted by time."""
    return Moved(link, sum(one.num_bytes for one in moved), sum(one.seconds for one in moved))

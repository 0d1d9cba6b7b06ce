"""What a bench returns: rows of named figures, for a screen or for a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table as ScreenTable


@dataclass(frozen=True)
class BenchTable:
    """One table: every row has a value for every column."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, object]]
    notes: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    """for machines only: settings and raw figures behind the rows"""

    def print(self, stream: TextIO) -> None:
        screen = ScreenTable(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            screen.add_column(column, justify="left" if number == 0 else "right")
        for row in self.rows:
            screen.add_row(*(_shown(row[column]) for column in self.columns))
        console = Console(file=stream, highlight=False)
        console.print(screen)
        for note in self.notes:
            console.print(note, markup=False)

    def write_json(self, path: Path) -> None:
        content = {"title": self.title, "rows": [dict(row) for row in self.rows], **self.details}
        path.write_text(json.dumps(content, indent=1) + "\n")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)

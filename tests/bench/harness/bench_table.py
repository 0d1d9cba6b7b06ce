"""What a bench returns: rows of named figures, for a screen or for a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.table import Table as ScreenTable

WIDTH_OF_FILES = 200


@dataclass(frozen=True)
class BenchTable:
    """One table: every row has the same columns, in the same order."""

    title: str
    rows: Sequence[Mapping[str, object]]
    notes: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    """for machines only: settings and raw figures behind the rows"""
    passed: bool = True
    """whether the figures are within the limits that the bench has for them"""

    def print(self, stream: TextIO) -> None:
        screen = ScreenTable(title=self.title, title_justify="left")
        for number, column in enumerate(self.rows[0] if self.rows else ()):
            screen.add_column(column, justify="left" if number == 0 else "right")
        for row in self.rows:
            screen.add_row(*map(_shown, row.values()))
        # In a file or a pipe, rows keep to one line.
        width = None if stream.isatty() else WIDTH_OF_FILES
        console = Console(file=stream, highlight=False, width=width)
        console.print(screen)
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=True)

    def to_json(self) -> str:
        content = {"rows": [dict(row) for row in self.rows], **self.details}
        return json.dumps(content, indent=1) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(figure)}" for name, figure in value.items())
    return "-" if value is None else str(value)

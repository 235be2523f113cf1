"""What the paper prints: paper.toml as data."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Figure = tuple[float | str, float | None]
"""What is printed, and its deviation where there is one."""


@dataclass(frozen=True)
class Printed:
    """A table: its columns and, for each of its parts (upper, lower), a row a method."""

    columns: tuple[str, ...]
    parts: dict[str, dict[str, tuple[Figure, ...]]]

    def figure(self, part: str, row: str, column: str) -> Figure | None:
        rows = self.parts.get(part, {})
        return rows[row][self.columns.index(column)] if row in rows and column in self.columns else None


@cache
def paper_tables() -> dict[str, Printed]:
    text = Path(__file__).with_name("paper.toml").read_text(encoding="utf-8")
    return {
        name: Printed(
            tuple(table["columns"]),
            {
                part: {row: tuple(map(_figure, values)) for row, values in rows.items()}
                for part, rows in table.items()
                if isinstance(rows, dict)
            },
        )
        for name, table in tomllib.loads(text).items()
    }


def _figure(value: float | str | list[float]) -> Figure:
    return (value[0], value[1]) if isinstance(value, list) else (value, None)

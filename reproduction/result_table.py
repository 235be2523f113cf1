"""A table or figure with ours beside the paper's, ready to be written in any form."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import hypot
from pathlib import Path

from reproduction.rankings import kendall_tau

Value = float | str


@dataclass(frozen=True)
class Cell:
    ours: Value | None = None
    spread: float | None = None
    paper: Value | None = None
    paper_spread: float | None = None
    missing: str = ""
    """Why there is nothing of ours."""

    @property
    def difference(self) -> float | None:
        both = isinstance(self.ours, float | int) and isinstance(self.paper, float | int)
        return float(self.ours) - float(self.paper) if both else None  # type: ignore[arg-type]

    @property
    def mark(self) -> str:
        """= the same, or within two deviations of the difference; else which way ours lies."""
        if self.ours is None or self.paper is None:
            return ""
        if self.difference is None:
            return "=" if self.ours == self.paper else "≠"
        room = 2 * hypot(self.spread or 0.0, self.paper_spread or 0.0)
        if abs(self.difference) <= max(room, 0.005):
            return "="
        return "↑" if self.difference > 0 else "↓"


@dataclass(frozen=True)
class Block:
    """One part of a table: a row a method, in the paper's order."""

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]
    places: int | None = 2
    """Decimals; None shows four digits, where columns have different units."""
    ranked: bool = False
    """Whether Kendall's tau is shown: the order of the rows is a ranking."""
    folded: bool = False
    """Closed on the page until it is clicked."""

    def taus(self) -> dict[str, float | None]:
        """Kendall's tau of each column, the paper's order of the methods against ours."""
        found = {}
        for i, column in enumerate(self.columns):
            pairs = {
                name: (cells[i].paper, cells[i].ours)
                for name, cells in self.rows.items()
                if isinstance(cells[i].paper, float | int) and isinstance(cells[i].ours, float | int)
            }
            paper = {name: float(p) for name, (p, _) in pairs.items()}  # type: ignore[arg-type]
            ours = {name: float(o) for name, (_, o) in pairs.items()}  # type: ignore[arg-type]
            found[column] = kendall_tau(paper, ours)
        return found

    def cells(self) -> Iterator[tuple[str, str, Cell]]:
        for row, cells in self.rows.items():
            for column, cell in zip(self.columns, cells, strict=True):
                yield row, column, cell


@dataclass(frozen=True)
class ResultTable:
    name: str
    title: str
    blocks: tuple[Block, ...] = ()
    notes: tuple[str, ...] = ()
    """Printed below the tables."""
    pictures: tuple[Path, ...] = ()

    def missing(self) -> dict[str, int]:
        """Why cells are empty, and how many."""
        found: dict[str, int] = {}
        for block in self.blocks:
            for _, _, cell in block.cells():
                if cell.missing:
                    found[cell.missing] = found.get(cell.missing, 0) + 1
        return found

"""What the functions that make tables share: the results, and cells made from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedlesam.runs.stats import SeedMean
from reproduction.items import DOMAINS, RunSpec
from reproduction.paper import Figure
from reproduction.plan import Only
from reproduction.result_table import Cell
from reproduction.results import Results


@dataclass(frozen=True)
class Context:
    """The arguments of every function that makes a table."""

    results: Results
    only: Only
    folder: Path
    """For pictures."""
    data_dir: str | None

    @property
    def scale_name(self) -> str:
        return self.results.scale.name

    @property
    def stand_in(self) -> str:
        """The data set in the place of those with domains, if any."""
        domains = self.results.scale.domains
        return domains.stand_in if domains is not None else ""

    def why_absent(self, data: str) -> str:
        """Why a table has no run of a data set."""
        return f"{self.stand_in} stands in for it" if self.stand_in and data in DOMAINS else "left out by --only"

    def data_sets(self, printed: Iterable[str]) -> tuple[str, ...]:
        """The paper's and the stand-in."""
        return (*printed, *filter(None, (self.stand_in,)))

    def cell(self, spec: RunSpec, measure: str = "last", printed: Figure | None = None) -> Cell:
        """Our accuracy beside the printed one."""
        paper, spread = printed or (None, None)
        return cell_of(self.results.accuracy(spec, measure), paper, spread, self.results.why_missing(spec))


def cell_of(ours: SeedMean | None, paper: float | str | None, paper_spread: float | None, missing: str) -> Cell:
    if ours is None:
        return Cell(None, None, paper, paper_spread, missing=missing or "nothing was evaluated")
    return Cell(ours.mean, ours.spread, paper, paper_spread)


def average(cells: Sequence[Cell]) -> Cell:
    """The mean of our values; empty unless all cells have one."""
    values = [cell.ours for cell in cells if isinstance(cell.ours, float)]
    missing = first(cell.missing for cell in cells)
    return Cell(fmean(values)) if values and not missing else Cell(missing=missing)


def first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")

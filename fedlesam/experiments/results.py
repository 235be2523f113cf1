"""What came of the runs that were asked for: seeds put together, holes named."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from fedlesam.experiments.items import Ask
from fedlesam.experiments.scales import Scale
from fedlesam.report.read import Run

MEASURES = {"last": "last round", "mean_of_last": "mean of the last evaluations", "best": "best round"}


@dataclass(frozen=True)
class Number:
    mean: float
    spread: float | None
    """Standard deviation over seeds; None with one."""


def number(values: list[float]) -> Number | None:
    return Number(fmean(values), stdev(values) if len(values) > 1 else None) if values else None


@dataclass(frozen=True)
class Results:
    scale: Scale
    runs: Mapping[Ask, list[Run]]
    """By the plain ask: one finished run a seed."""
    holes: Mapping[Ask, str]
    """Why there is none."""
    seeds: int

    def of(self, ask: Ask) -> list[Run]:
        return self.runs.get(ask.plain, [])

    def hole(self, ask: Ask) -> str:
        return self.holes.get(ask.plain, "" if self.of(ask) else "not run")

    def accuracy(self, ask: Ask, measure: str = "last") -> Number | None:
        """In percent."""
        return number([100 * run.accuracy[measure] for run in self.of(ask) if measure in run.accuracy])

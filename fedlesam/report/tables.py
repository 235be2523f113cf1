"""Runs side by side: one row a method, best first."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from fedlesam.report.read import Run


@dataclass(frozen=True)
class Row:
    """One method over its seeds; accuracies are shares, spreads their standard deviation over seeds."""

    algorithm: str
    """By its name for readers."""
    seeds: int
    last: float | None
    """None unless every run was evaluated after its last round."""
    mean_of_last: float | None
    best: float | None
    spread: float | None
    """Of `mean_of_last`; None with one seed."""
    backward_passes: float
    megabytes: float
    """Down and up, all clients and rounds."""
    seconds: float
    rounds: float


def ranking(runs: list[Run]) -> list[Row]:
    """Best mean of the last evaluations first; costs are means over seeds."""
    by_method: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_method[run.method].append(run)
    return rank(by_method.items())


def rank(named: Iterable[tuple[str, list[Run]]]) -> list[Row]:
    rows = [_row(name, seeds) for name, seeds in named]
    return sorted(rows, key=lambda row: (row.mean_of_last is None, -(row.mean_of_last or 0.0)))


def _row(algorithm: str, runs: list[Run]) -> Row:
    def accuracy(name: str) -> list[float]:
        return [run.accuracy[name] for run in runs if name in run.accuracy]

    def mean(values: list[float]) -> float | None:
        return fmean(values) if values else None

    return Row(
        algorithm=algorithm,
        seeds=len(runs),
        last=mean(accuracy("last")) if len(accuracy("last")) == len(runs) else None,
        mean_of_last=mean(accuracy("mean_of_last")),
        best=mean(accuracy("best")),
        spread=stdev(accuracy("mean_of_last")) if len(accuracy("mean_of_last")) > 1 else None,
        backward_passes=fmean(run.total("backward_passes") for run in runs),
        megabytes=fmean(run.total("bytes_down") + run.total("bytes_up") for run in runs) / 1e6,
        seconds=fmean(run.total("seconds") for run in runs),
        rounds=fmean(len(run.records) for run in runs),
    )

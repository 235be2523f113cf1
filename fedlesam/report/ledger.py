"""What a method cost, as its runs counted it, and what it cost to get somewhere; FedAvg is the unit."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fedlesam.report.groups import Comparison, Group
from fedlesam.runs.evaluated import value_of
from fedlesam.runs.read import Run

BYTES_OF_A_VALUE = 4


@dataclass(frozen=True)
class Spent:
    """What a run cost up to some round."""

    rounds: float
    """Mean over seeds where it is of several."""
    megabytes: float | None
    """Down and up, all clients; None of centralised training, which sends nothing."""
    seconds: float
    """Of training, without evaluation."""


@dataclass(frozen=True)
class ToTarget:
    """What the seeds of a group needed until their first evaluation at or above a target."""

    reached: int
    """The seeds that got there."""
    seeds: int
    """All of them."""
    best: float | None
    """The best evaluation of all seeds."""
    spent: Spent | None
    """Mean over seeds; None unless all of them got there: a mean over the lucky ones would flatter."""


def to_target(run: Run, target: float) -> Spent | None:
    """The cost up to the first evaluation at or above a target; None if there is none.

    Args:
        run: The run.
        target: Of its measure; an accuracy as a share.
    """
    sent = seconds = 0.0
    for record in run.records:
        sent += record["bytes_down"] + record["bytes_up"]
        seconds += record["seconds"]
        value = value_of(record, run.measure.key)
        if value is not None and run.measure.reaches(value, target):
            return Spent(record["round"] + 1, None if run.centralised else sent / 1e6, seconds)
    return None


def group_to_target(group: Group, target: float) -> ToTarget:
    """The cost of a group up to a target.

    Args:
        group: Runs of one method.
        target: Of the measure; an accuracy as a share.
    """
    there = [spent for run in group.runs if (spent := to_target(run, target)) is not None]
    measure = group.runs[0].measure
    seen = [value for run in group.runs for value in run.curve(measure.key)[1]]
    mean = None
    if len(there) == len(group.runs):
        sent = [spent.megabytes for spent in there if spent.megabytes is not None]
        rounds, seconds = (fmean(getattr(s, name) for s in there) for name in ("rounds", "seconds"))
        mean = Spent(rounds, fmean(sent) if sent else None, seconds)
    return ToTarget(len(there), len(group.runs), measure.best(seen), mean)


def default_targets(comparison: Comparison) -> list[float]:
    """FedAvg's final accuracy in whole percent, and 9/10 of it; without FedAvg, that of the weakest method.

    Of another measure two digits of it, and 9/10 of the way there, or 10/9 where smaller is better.

    Args:
        comparison: The groups of runs that are compared.
    """
    groups = [comparison.baseline] if comparison.baseline is not None else comparison.groups
    ends = [fmean(found) for g in groups if (found := [e for r in g.runs if (e := r.scores.get("mean_of_last"))])]
    if not ends:
        return []
    measure = comparison.measure
    if not measure.percent:
        worst = max(ends) if measure.smaller else min(ends)
        farther = worst / 0.9 if measure.smaller == (worst > 0) else worst * 0.9
        digits = (float(f"{target:.2g}") for target in (farther, worst))
        return list(dict.fromkeys(digits))
    end = int(100 * min(ends))
    return [t / 100 for t in sorted({int(0.9 * end), end}) if t > 0]


@dataclass(frozen=True)
class Ledger:
    """Of one round, mean over rounds and seeds."""

    backward_passes: float
    """Of all active clients together."""
    megabytes_down: float | None
    """From the server to all active clients; None of centralised training."""
    megabytes_up: float | None
    """None of centralised training."""
    client_megabytes: float | None
    """What a client holds between its rounds, the model included; None where the run has not said yet."""
    seconds: float
    """Of training, without evaluation."""


def ledger(group: Group) -> Ledger | None:
    """The mean cost of a round; None if no round was done.

    Args:
        group: Runs of one method.
    """
    rounds = sum(len(run.records) for run in group.runs)
    if not rounds:
        return None

    def mean(name: str) -> float:
        return sum(run.total(name) for run in group.runs) / rounds

    down, up = (None, None) if group.centralised else (mean("bytes_down") / 1e6, mean("bytes_up") / 1e6)
    return Ledger(mean("backward_passes"), down, up, _held(group.runs), mean("seconds"))


def _held(runs: Iterable[Run]) -> float | None:
    known = [run.summary for run in runs if {"client_memory_bytes", "parameters"} <= run.summary.keys()]
    sizes = [one["client_memory_bytes"] + BYTES_OF_A_VALUE * one["parameters"] for one in known]
    return max(sizes) / 1e6 if sizes else None


def times(value: float | None, unit: float | None) -> float | None:
    """A cost as a multiple of FedAvg's.

    Args:
        value: The cost.
        unit: FedAvg's.
    """
    return value / unit if value is not None and unit else None

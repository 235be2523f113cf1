"""Methods over their seeds, best first, and their paired differences from the first method."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from fedlesam.report.groups import compare_runs, numbers, shown
from fedlesam.runs.evaluated import PARTS, Measure, over_clients
from fedlesam.runs.read import Run
from fedlesam.runs.stats import SeedMean, paired, seed_mean

MEASURES = {"last": "last round", "mean_of_last": "mean of last evaluations", "best": "best round"}
"""Scores of a run, and their names for readers."""


@dataclass(frozen=True)
class Gain:
    """A mean difference from the first method over the seeds both have, and its 95 % t-interval."""

    mean: float
    """Of the differences; in the unit of the measure."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    seeds: int
    """Those that both methods have."""


@dataclass(frozen=True)
class Row:
    """One method over its seeds. Dictionaries have the keys of `MEASURES`."""

    algorithm: str
    """By its name for readers."""
    seeds: int
    """How many runs the method has."""
    last: float | None
    """None unless every run was evaluated after its last round."""
    mean_of_last: float | None
    """Mean over the last evaluations of a run; None where one has none."""
    best: float | None
    """Mean over seeds of a run's best evaluation; None where one has none."""
    spread: float | None
    """Of `mean_of_last`; None with one seed."""
    backward_passes: float
    """Of a whole run."""
    megabytes: float
    """Down and up, all clients and rounds."""
    seconds: float
    """Of training in a whole run, without evaluation."""
    rounds: float
    """Done."""
    hyper: str = ""
    """The method's hyper-parameters, defaults included."""
    spreads: dict[str, float] = field(default_factory=dict)
    """Standard deviations over seeds; empty with one seed."""
    gains: dict[str, Gain] = field(default_factory=dict)
    """Over the first method; empty for itself and where fewer than two seeds are common."""
    measure: Measure = Measure()
    """What the scores are of."""
    clients: dict[str, float] = field(default_factory=dict)
    """The measure on clients' own test samples after the last round: its mean, worst tenth and spread over clients."""
    client_spreads: dict[str, float] = field(default_factory=dict)
    """Their standard deviations over seeds; empty with one seed."""
    sharpness: SeedMean | None = None
    """How much the loss rose within the radius of the probe, at its last reading; None without that probe."""
    numbers: str = ""
    """The hyper-parameters that are numbers; without a server step of 1, the plain mean."""


def ranking(runs: list[Run]) -> list[Row]:
    """Methods, best mean of the last evaluations first; costs are means over seeds, gains over the first method.

    Args:
        runs: The runs.
    """
    return rank((group.label, group.runs) for group in compare_runs(runs).groups)


def rank(named: Iterable[tuple[str, list[Run]]]) -> list[Row]:
    """Groups of runs, best first; gains are over the first group.

    Args:
        named: Labels, and the runs of each.
    """
    methods = dict(named)
    first = next(iter(methods.values()), [])
    rows = [_row(name, runs, first) for name, runs in methods.items()]
    sign = 1 if rows and rows[0].measure.smaller else -1
    return sorted(rows, key=lambda row: (row.mean_of_last is None, sign * (row.mean_of_last or 0.0)))


def _row(algorithm: str, runs: list[Run], first: list[Run]) -> Row:
    found = {name: seed_mean([run.scores[name] for run in runs if name in run.scores]) for name in MEASURES}
    if not all("last" in run.scores for run in runs):
        found["last"] = None
    spreads = {name: of.spread for name, of in found.items() if of is not None and of.spread is not None}
    over = _over_clients(runs)
    gains = {name: gain for name in MEASURES if (gain := _gain(runs, first, name)) is not None}
    return Row(
        algorithm=algorithm,
        seeds=len(runs),
        **{name: None if of is None else of.mean for name, of in found.items()},
        spread=spreads.get("mean_of_last"),
        backward_passes=fmean(run.total("backward_passes") for run in runs),
        megabytes=fmean(run.total("bytes_down") + run.total("bytes_up") for run in runs) / 1e6,
        seconds=fmean(run.total("seconds") for run in runs),
        rounds=fmean(len(run.records) for run in runs),
        hyper=", ".join(f"{name}={shown(value)}" for name, value in runs[0].config.hyper.items()),
        spreads=spreads,
        gains=gains,
        measure=first[0].measure,
        clients={part: of.mean for part, of in over.items()},
        client_spreads={part: of.spread for part, of in over.items() if of.spread is not None},
        sharpness=seed_mean([rise for run in runs if (rise := last_rise(run)) is not None]),
        numbers=numbers(runs[0].config.hyper),
    )


def _over_clients(runs: list[Run]) -> dict[str, SeedMean]:
    """Over seeds; empty unless every run tested its clients after its last round."""
    found = [over_clients(run.records[-1] if run.records else {}, run.measure) for run in runs]
    means = {part: seed_mean([one[part] for one in found]) for part in PARTS if all(part in one for one in found)}
    return {part: of for part, of in means.items() if of is not None}


def last_rise(run: Run) -> float | None:
    """The sharpness at its last reading; None without that probe.

    Args:
        run: The run.
    """
    readings = run.series("sharpness")
    return readings[-1].values.get("ascent") if readings else None


def _gain(runs: list[Run], first: list[Run], measure: str) -> Gain | None:
    if runs is first:
        return None
    over = paired(*({r.config.seed: r.scores[measure] for r in of if measure in r.scores} for of in (runs, first)))
    return Gain(over.mean, *over.interval(), len(over.values)) if len(over.values) > 1 else None

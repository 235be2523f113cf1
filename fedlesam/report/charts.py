"""The curves of a comparison as numbers, drawn alike by the page and by matplotlib."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np

from fedlesam.probes.readings import Reading
from fedlesam.report import clients
from fedlesam.report.groups import Comparison, Group, is_how_measured, shown
from fedlesam.runs.evaluated import HELD_OUT, RENAMED, Measure
from fedlesam.runs.read import Run

COSTS = {
    "backward passes": ("backward_passes",),
    "MB sent": ("bytes_down", "bytes_up"),
    "seconds of training": ("seconds",),
}
"""What a curve can be drawn against, other than rounds."""


Curve = tuple[list[int], list[float]]
"""Rounds done, and values."""


@dataclass(frozen=True)
class Series:
    """The mean over the seeds of a group, and the range between the lowest and the highest."""

    group: int
    """The place of the group in the comparison."""
    x: list[float]
    """Where it was measured, e.g. rounds."""
    mean: list[float]
    """Over the seeds, at each x."""
    low: list[float] | None
    """The lowest seed at each x; None with one seed."""
    high: list[float] | None
    """None with one seed."""
    costs: dict[str, list[float]] = field(default_factory=dict)
    """Counted up to each x, mean over seeds."""


@dataclass(frozen=True)
class Chart:
    """Curves with their labels, as the page and the pictures draw them."""

    key: str
    """Also the name of its file."""
    section: str
    """The heading under which it stands."""
    title: str
    """Above the chart."""
    x_label: str
    """Of the horizontal axis, with its unit."""
    y_label: str
    """Of the vertical axis, with its unit."""
    series: list[Series]
    """The curves."""
    caption: str = ""
    """Below the chart."""
    log: bool = False
    """Whether its values span orders of magnitude."""
    points: bool = False
    """Whether there are so few that each is marked."""


LEARNING = (
    ("test_accuracy", "Test accuracy", "test accuracy (%)", 100.0),
    ("test_loss", "Test loss", "test loss", 1.0),
    ("train_loss", "Training loss", "training loss", 1.0),
    ("divergence", "Divergence of local models", "mean of |v_i - w|²", 1.0),
    ("epsilon", "Privacy spent", "epsilon", 1.0),
)

CAPTIONS = {
    "train_loss": "Mean over the active clients and their local steps, at the perturbed point and on their own data.",
    "epsilon": "The epsilon of (epsilon, delta)-differential privacy up to each round, from the accountant.",
    "divergence": "Mean over the active clients of the squared distance from their model to the next global one.",
}


FIRST = {"sharpness": "ascent", "drift": "drift", "hessian": "eigenvalue_1", "estimate": "cosine"}
"""The number of a probe that is shown before the others."""

MANY = 12
"""A number of each client, such as local_0, local_1 and so on, is not drawn where there are more."""


def charts_of(comparison: Comparison) -> list[Chart]:
    """All charts for which the runs have numbers.

    Args:
        comparison: The groups of runs that are compared.
    """
    found = [*learning_curves(comparison), *client_curves(comparison), *probe_curves(comparison)]
    return [*found, *slices(comparison)]


def learning_curves(comparison: Comparison) -> list[Chart]:
    """Accuracy, losses and divergence over rounds.

    Args:
        comparison: The groups of runs that are compared.
    """
    found = []
    for name, title, label, factor in (*_metrics(comparison), *LEARNING):
        series = _series(comparison, partial(Run.curve, name=name), factor)
        key, log = name, name == "divergence" and _spans(series)
        if comparison.evaluated_on == HELD_OUT:
            key, title = RENAMED.get(name, name), title.replace("Test", "Held-out")
            label = label.replace("test", HELD_OUT)
        if series:
            found.append(Chart(key, "learning", title, "round", label, series, CAPTIONS.get(key, ""), log))
    return found


def _metrics(comparison: Comparison) -> list[tuple[str, str, str, float]]:
    """The metrics that have no name of their own in a record."""
    names = dict.fromkeys(name for run in comparison.runs for r in run.records for name in r.get("metrics") or ())
    measures = [Measure(name) for name in names if name != "accuracy"]
    return [(m.key, f"Test {m.title}", f"test {m.title}{' (%)' if m.percent else ''}", m.scale) for m in measures]


def client_curves(comparison: Comparison) -> list[Chart]:
    """How a metric is distributed over clients, over rounds: its worst tenth, its mean and its spread.

    Args:
        comparison: The groups of runs that are compared.
    """
    found = []
    for one in clients.distributions(comparison.runs):
        for number, words in clients.NUMBERS.items():
            series = _series(comparison, partial(clients.curve, of=one, number=number), one.measure.scale)
            label = f"{words}{' (%)' if one.measure.percent else ''}"
            if series:
                key = f"{one.key}-{number}"
                found.append(Chart(key, "clients", f"{one.title}: {words}", "round", label, series, one.caption))
    return found


def _series(comparison: Comparison, curve: Callable[[Run], Curve], factor: float) -> list[Series]:
    """Of the groups that have it."""
    groups = enumerate(comparison.groups)
    return [series for i, group in groups if (series := _over_seeds(i, group, curve, factor)) is not None]


def _over_seeds(number: int, group: Group, curve: Callable[[Run], Curve], factor: float) -> Series | None:
    curves = [(run, dict(zip(*found, strict=True))) for run in group.runs if (found := curve(run))[0]]
    series = _mean(number, [{x: factor * y for x, y in points.items()} for _, points in curves])
    return None if series is None else replace(series, costs=_costs(group, [run for run, _ in curves], series.x))


def _costs(group: Group, runs: list[Run], xs: list[float]) -> dict[str, list[float]]:
    """What the runs had spent after so many rounds, mean over seeds; without what a run does not say."""
    found = {}
    for cost, parts in COSTS.items():
        if cost == "MB sent" and group.centralised:
            continue
        spent = [[0.0, *_spent(run, parts)] for run in runs]
        if all(len(one) == len(run.records) + 1 > max(xs) for one, run in zip(spent, runs, strict=True)):
            scale = 1e-6 if cost == "MB sent" else 1.0
            found[cost] = [scale * float(np.mean([one[int(x)] for one in spent])) for x in xs]
    return found


def _spent(run: Run, parts: tuple[str, ...]) -> list[float]:
    """After each round."""
    counted = [r for r in run.records if all(part in r for part in parts)]
    return list(accumulate(sum(r[part] for part in parts) for r in counted))


def _mean(number: int, curves: list[dict[int, float]]) -> Series | None:
    """At the points that all seeds have."""
    xs = sorted(set.intersection(*map(set, curves))) if curves else []
    if not xs:
        return None
    values = np.array([[curve[x] for x in xs] for curve in curves])
    low, high = (values.min(0).tolist(), values.max(0).tolist()) if len(curves) > 1 else (None, None)
    return Series(number, [float(x) for x in xs], values.mean(0).tolist(), low, high)


def probe_curves(comparison: Comparison) -> list[Chart]:
    """A chart for each number of each probe.

    Args:
        comparison: The groups of runs that are compared.
    """
    found: dict[tuple[str, str], list[Series]] = defaultdict(list)
    measured: dict[str, list[Reading]] = defaultdict(list)
    for i, group in enumerate(comparison.groups):
        curves: dict[tuple[str, str], dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for place, run in enumerate(group.runs):
            for one in (one for probe in run.probes for one in run.series(probe)):
                measured[one.probe].append(one)
                for name, value in one.values.items():
                    curves[one.probe, name][place][one.round] = value
        for key, by_run in curves.items():
            if mean := _mean(i, list(by_run.values())):
                costs = _costs(group, [group.runs[place] for place in by_run], mean.x)
                found[key].append(replace(mean, costs=costs))
    families = Counter((probe, _family(name)) for probe, name in found)
    charts = []
    for (probe, name), series in sorted(found.items(), key=lambda item: item[0][1] != FIRST.get(item[0][0])):
        if families[probe, _family(name)] > MANY:
            continue
        words = name.replace("_", " ").replace("/", ", ")
        title, caption = probe.capitalize(), _how_measured(measured[probe])
        title += "" if words == probe else f": {words}"
        few = max(len(s.x) for s in series) <= 60
        charts.append(Chart(f"{probe}-{name}", probe, title, "round", words, series, caption, _spans(series), few))
    return charts


def _family(name: str) -> str:
    return re.sub(r"\d+$", "*", name)


def _how_measured(measurements: list[Reading]) -> str:
    settings = {
        ", ".join(f"{k.replace('_', ' ')} {shown(v)}" for k, v in one.metadata.items() if is_how_measured(k, v))
        for one in measurements
    }
    return f"Measured with {settings.pop()}." if len(settings) == 1 and "" not in settings else ""


def slices(comparison: Comparison) -> list[Chart]:
    """The loss along one direction.

    Args:
        comparison: The groups of runs that are compared.
    """
    series, caption = [], ""
    for i, group in enumerate(comparison.groups):
        surfaces = [(run, surface) for run in group.runs if (surface := run.surface(1)) is not None]
        if surfaces:
            run, surface = surfaces[0]
            series.append(Series(i, surface.x.tolist(), surface.loss.tolist(), None, None))
            caption = f"Along one filter-normalised direction; seed {run.config.seed}."
    return [Chart("surface-1d", "surface", "Loss along a line", "distance", "loss", series, caption)] if series else []


def _spans(series: list[Series]) -> bool:
    values = np.array([value for one in series for value in one.mean if np.isfinite(value)])
    return bool(len(values) and values.min() > 0 and values.max() / values.min() > 100)

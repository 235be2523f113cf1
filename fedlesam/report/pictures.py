"""Pictures of runs and splits, drawn without a screen."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedlesam.core.disk import replacing
from fedlesam.core.names import file_name
from fedlesam.report.charts import Chart, learning_curves
from fedlesam.report.groups import Comparison, Group, compare_runs
from fedlesam.report.ranking import last_rise
from fedlesam.report.style import MARKERS
from fedlesam.runs.evaluated import RENAMED
from fedlesam.runs.read import Run
from fedlesam.runs.stats import seed_mean

COLUMN = 3.4
"""Width of a column of a paper, in inches."""

PAPER: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # fonts that journals take
}
PAPER_DOTS = 300
MANY = 6
"""Lines, beyond which a legend would lie on them."""


def accuracy_curves(runs: list[Run], path: Path, title: str) -> Path:
    """The measure over rounds: the mean over seeds, and the range between the lowest and the highest.

    Where sharpness was measured, it is beside: the measure over it at the end, with standard deviations over seeds.

    Args:
        runs: The runs.
        path: The file.
        title: Above the picture.
    """
    comparison = compare_runs(runs)
    probed = any(last_rise(run) is not None for run in runs)
    figure = Figure(figsize=(10.2 if probed else 7.2, 4.4), layout="constrained")
    axes, *beside = figure.subplots(1, 2, width_ratios=(5, 3)) if probed else [figure.subplots()]
    measure = comparison.measure
    charts = [c for c in learning_curves(comparison) if c.key in (measure.key, RENAMED.get(measure.key))]
    if charts:
        _curves(axes, charts[0], comparison.groups, 1.4)
        if len(comparison.groups) > MANY:
            figure.legend(loc="outside right center", frameon=False, fontsize=9)
        else:
            axes.legend(frameon=False, loc="upper right" if measure.smaller else "lower right", fontsize=9)
    label = f"{comparison.evaluated_on} {measure.title}{' (%)' if measure.percent else ''}"
    axes.set(xlabel="round", ylabel=label, title=title)
    if beside:
        _over_sharpness(beside[0], comparison)
        beside[0].set(xlabel="sharpness: rise of the training loss", ylabel=label, title="mean of the last evaluations")
    return save(figure, path)


def _over_sharpness(axes: Axes, comparison: Comparison) -> None:
    scale, points = comparison.measure.scale, []
    for group in comparison.groups:
        rise = seed_mean([found for run in group.runs if (found := last_rise(run)) is not None])
        end = seed_mean([scale * run.scores["mean_of_last"] for run in group.runs if "mean_of_last" in run.scores])
        if rise is not None and end is not None:
            colour, line = group.look
            bars: dict[str, Any] = {"yerr": end.spread, "xerr": rise.spread, "color": colour}
            axes.errorbar(rise.mean, end.mean, fmt=MARKERS[line], capsize=2, linewidth=1, **bars)
            points.append((end.mean, rise.mean, plain(group.label), colour))
    if len(comparison.groups) > MANY:
        points.clear()  # names would lie on each other; the legend has colours and markers
    close, above = 0.06 * float(np.ptp([y for y, *_ in points] or [0])), np.inf
    for y, x, name, colour in sorted(points, reverse=True):
        place = (6, -13) if above - y < close else (6, 5)  # names of equal points would lie on each other
        axes.annotate(name, (x, y), place, textcoords="offset points", fontsize=9, color=colour)
        above = y
    axes.margins(x=0.25)
    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    bare(axes)


def chart_picture(chart: Chart, groups: list[Group], folder: Path) -> list[Path]:
    """A chart of the report in the style of a paper.

    Args:
        chart: The chart.
        groups: The groups of the comparison.
        folder: Where the files go.
    """
    names = 1 + max(len(groups[series.group].legend) for series in chart.series)
    columns = max(1, min(4, 44 // (names + 6)))
    rows = -(-len(chart.series) // columns)
    with rc_context(PAPER):
        figure = Figure(figsize=(COLUMN, 2.3 + 0.14 * rows), layout="constrained")
        axes = figure.subplots()
        _curves(axes, chart, groups, 1.0)
        own = chart.section == "learning"  # a number of a probe says too little without the probe's name
        axes.set(xlabel=chart.x_label, ylabel=plain(chart.y_label if own else chart.title.lower()))
        if len(chart.series) > 1:
            figure.legend(loc="outside lower center", ncol=columns, frameon=False, handlelength=2.2, columnspacing=1.0)
        return save_for_paper(figure, folder, chart.key)


def _curves(axes: Axes, chart: Chart, groups: list[Group], width: float) -> None:
    for series in chart.series:
        colour, line = groups[series.group].look
        marks: dict[str, Any] = {"markersize": 2.5 * width, "markevery": None if chart.points else [-1]}
        if chart.points or len(groups) > MANY:
            marks["marker"] = MARKERS[line]
        label = plain(groups[series.group].legend)
        axes.plot(series.x, series.mean, color=colour, linestyle=line, linewidth=width, label=label, **marks)
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    if chart.x_label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if chart.log:
        axes.set_yscale("log")
    bare(axes)


def bare(axes: Axes) -> None:
    """A light grid, and no frame above and to the right.

    Args:
        axes: Of a chart.
    """
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def plain(text: str) -> str:
    """Text in which matplotlib finds no mathematics.

    Args:
        text: Any text.
    """
    return text.replace("$", r"\$")


def split_heat_map(counts: NDArray[np.int64], classes: list[str], path: Path, title: str) -> Path:
    """Samples of each class (rows) at each client (columns), as in the paper's figure 5.

    Args:
        counts: Samples by client and class.
        classes: Their names.
        path: The file.
        title: Above the picture.
    """
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    _heat(figure, counts, classes).set_title(title)
    return save(figure, path)


def split_picture(counts: NDArray[np.int64], folder: Path, name: str) -> list[Path]:
    """A heat map of a split in the style of a paper.

    Args:
        counts: Samples by client and class.
        folder: Where the files go.
        name: Of the files, without their ending.
    """
    with rc_context(PAPER):
        figure = Figure(figsize=(COLUMN, 1.9), layout="constrained")
        _heat(figure, counts, [str(c) for c in range(counts.shape[1])])
        return save_for_paper(figure, folder, name)


def _heat(figure: Figure, counts: NDArray[np.int64], classes: list[str]) -> Axes:
    axes: Axes = figure.subplots()
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
    axes.set(xlabel="client", ylabel="class")
    if len(classes) <= 20:
        axes.set_yticks(range(len(classes)), classes)
    figure.colorbar(image, ax=axes, label="samples", pad=0.01)
    return axes


def save(figure: Figure, path: Path, dots: int = 150) -> Path:
    """Write a figure; the ending of the file chooses PNG or PDF.

    Args:
        figure: The figure.
        path: The file.
        dots: Per inch, in a PNG.
    """
    FigureCanvasAgg(figure)
    undated = {"CreationDate": None} if path.suffix == ".pdf" else None  # the same numbers, the same file
    with replacing(path, sync=False) as beside:
        figure.savefig(beside, format=path.suffix.removeprefix("."), dpi=dots, metadata=undated)
    return path


def save_for_paper(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and PDF.

    Args:
        figure: The figure.
        folder: Where the files go.
        name: Of the files, without their ending.
    """
    return [save(figure, folder / f"{file_name(name)}.{ending}", PAPER_DOTS) for ending in ("png", "pdf")]


def comparison(runs: list[Run], out: Path) -> list[Path]:
    """The accuracy curves, and the split of the first seed.

    Args:
        runs: The runs.
        out: Where the pictures go.
    """
    config, counts = runs[0].config, runs[0].class_counts()
    clients = config.clients if counts is None else len(counts)
    active = f"{100 * config.active:g} %" if isinstance(config.active, float) else config.active
    title = f"{config.data}, {config.model}, {config.split}, {clients} clients, {active} active"
    drawn = [accuracy_curves(runs, out / f"{file_name(compare_runs(runs).measure.name)}.png", title)]
    if counts is not None:
        classes = [str(c) for c in range(counts.shape[1])]
        title = f"{config.data}, {config.split}: samples per class and client"
        drawn.append(split_heat_map(counts, classes, out / "split.png", title))
    return drawn

"""Pictures of runs and splits, drawn without a screen."""

from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedlesam.report.read import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's colours, which colour-blind readers can tell apart, less the yellow that vanishes on white."""

FAMILY = {
    name: i
    for i, names in enumerate(
        (
            ("fedavg", "fedprox", "freesam-d"),
            ("fedlesam", "fedadam"),
            ("scaffold", "freesam"),
            ("fedsam", "fedlesam-m"),
            ("fedlesam-s", "fedcm", "mofedsam"),
            ("fedgamma", "fedlesam-d"),
            ("feddyn", "freesam-s"),
            ("fedsmoo",),
        )
    )
    for name in names
}


def style(algorithm: str, taken: list[str]) -> tuple[str, str]:
    """Colour and line of a method: the same in every picture; a method not of the catalogue gets what is left.

    Perturbations that cost nothing are dashed: they often lie on top of their base.
    """
    if algorithm in FAMILY:
        shared = "-." if algorithm in ("fedprox", "mofedsam") else "-"
        line = "--" if algorithm.startswith("fedlesam") else ":" if algorithm.startswith("freesam") else shared
        return COLOURS[FAMILY[algorithm]], line
    used = {FAMILY[name] for name in taken if name in FAMILY}
    left = [colour for i, colour in enumerate(COLOURS) if i not in used] or list(COLOURS)
    return left[[name for name in taken if name not in FAMILY].index(algorithm) % len(left)], "-"


def accuracy_curves(runs: list[Run], path: Path, title: str) -> Path:
    """Test accuracy over rounds: the mean over seeds, and the range between the lowest and the highest."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    by_method: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_method[run.algorithm].append(run)
    ends = []
    for name, seeds in by_method.items():
        curves = [dict(zip(*run.curve("test_accuracy"), strict=True)) for run in seeds]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not rounds:
            continue
        values = np.array([[100 * curve[r] for r in rounds] for curve in curves])
        colour, line = style(name, list(by_method))
        axes.plot(rounds, values.mean(0), color=colour, linestyle=line, linewidth=1.4, label=name)
        if len(seeds) > 1:
            axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
        ends.append(values.mean(0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="round", ylabel="test accuracy (%)", title=title)
    if ends:
        low = min(float(np.percentile(curve, 10)) for curve in ends)
        axes.set_ylim(bottom=max(0.0, low - 5))
        axes.legend(frameon=False, loc="lower right", fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return save(figure, path)


def split_heat_map(counts: NDArray[np.int64], classes: list[str], path: Path, title: str) -> Path:
    """Samples of each class (rows) at each client (columns), as in the paper's figure 5."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes: Axes = figure.subplots()
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
    axes.set(xlabel="client", ylabel="class", title=title)
    if len(classes) <= 20:
        axes.set_yticks(range(len(classes)), classes)
    figure.colorbar(image, ax=axes, label="samples", pad=0.01)
    return save(figure, path)


def save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".part-{path.name}")
    figure.savefig(beside, dpi=150)
    beside.replace(path)
    return path

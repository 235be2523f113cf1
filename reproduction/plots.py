"""The paper's figures that follow from runs and splits."""

from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedlesam.report.pictures import save
from fedlesam.report.style import MARKERS, looks, style

Curve = Sequence[tuple[float, float]]


def heat_maps(panels: Mapping[str, NDArray[np.int64]], path: Path) -> Path:
    """Figure 5: samples of each class (rows) at each client (columns)."""
    rows = -(-len(panels) // 4)
    figure = Figure(figsize=(14, 2.9 * rows), layout="constrained")
    places = figure.subplots(rows, 4, squeeze=False).flatten().tolist()
    for axes, (title, counts) in zip(places, panels.items(), strict=False):
        image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
        axes.set(xlabel="client", ylabel="class", title=title)
        axes.title.set_fontsize(9)
        figure.colorbar(image, ax=axes, pad=0.01)
    for spare in places[len(panels) :]:
        figure.delaxes(spare)
    return save(figure, path)


def over_rounds(panels: Mapping[str, Mapping[str, Curve]], path: Path) -> Path:
    """Figure 2: a panel a measure, a line a method, one legend; centralised training is grey."""
    wide = min(2, len(panels))
    rows = -(-len(panels) // wide)
    figure = Figure(figsize=(4.6 * wide + 1.8, 3.2 * rows), layout="constrained")
    places = figure.subplots(rows, wide, squeeze=False).flatten().tolist()
    lines: dict[str, Artist] = {}
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    own = dict(zip(names, looks(names), strict=True))
    for axes, (title, curves) in zip(places, panels.items(), strict=False):
        for name, points in curves.items():
            colour, line = own[name]
            (drawn,) = axes.plot([x for x, _ in points], [y for _, y in points], line, color=colour, linewidth=1.4)
            lines.setdefault(name, drawn)
        axes.set(xlabel="share of training", title=title)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    for spare in places[len(panels) :]:
        figure.delaxes(spare)
    figure.legend(list(lines.values()), list(lines), loc="outside right center", frameon=False, fontsize=9)
    return save(figure, path)


def ablation(panels: Mapping[str, tuple[Curve, float | None]], path: Path) -> Path:
    """Figure 4: accuracy over log10(rho / lr); the horizontal line is FedAvg."""
    figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False).flatten().tolist()
    for axes, (title, (points, base)) in zip(places, panels.items(), strict=True):
        colour, line = style("fedlesam-s", ["fedlesam-s"])
        axes.plot([log10(x) for x, _ in points], [y for _, y in points], f"o{line}", color=colour, label="fedlesam-s")
        if base is not None:
            axes.axhline(base, color=style("fedavg", ["fedavg"])[0], label="fedavg", linewidth=1.2)
        axes.set(xlabel="log10(rho / lr)", ylabel="test accuracy (%)", title=title)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return save(figure, path)


Measured = Sequence[tuple[float, float, float]]
"""(rho, mean, standard deviation) of each rho; one without a rho has one point at 0."""

SHOWN = 9.0
"""Points of accuracy below the lowest base; an arm that fell further is named at the edge."""


def over_rho(panels: Mapping[str, Mapping[str, Measured]], path: Path) -> Path:
    """Accuracy over rho, a panel a base with the arms that perturb it; the base is the horizontal line."""
    wide = min(2, len(panels))
    rows = -(-len(panels) // wide)
    figure = Figure(figsize=(6 * wide, 4.2 * rows), layout="constrained")
    places = figure.subplots(rows, wide, squeeze=False, sharex=True, sharey=True).flatten().tolist()
    lowest = min((arms[base][0][1] for base, arms in panels.items() if arms[base]), default=SHOWN) - SHOWN
    for axes, (base, arms) in zip(places, panels.items(), strict=False):
        gone = []
        for (name, points), (colour, line) in zip(arms.items(), looks(list(arms)), strict=True):
            if points and points[0][0] == 0:
                axes.axhline(points[0][1], color=colour, label=name, linewidth=1.2)
                continue
            seen = [point for point in points if point[1] >= lowest]
            x, y, spread = zip(*seen, strict=True) if seen else ((), (), ())
            axes.errorbar(x, y, spread, fmt=f"{MARKERS[line]}{line}", color=colour, label=name, markersize=4, capsize=2)
            gone += [f"{name} at rho {rho:g}: {mean:.0f} %" for rho, mean, _ in points if mean < lowest]
        if gone:
            axes.text(0.98, 0.02, "\n".join(gone), transform=axes.transAxes, ha="right", fontsize=8)
        axes.set(xscale="log", xlabel="rho", ylabel="test accuracy (%)", title=f"{base} and its perturbations")
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    for spare in places[len(panels) :]:
        figure.delaxes(spare)
    return save(figure, path)

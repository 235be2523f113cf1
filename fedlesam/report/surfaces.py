"""Pictures of loss surfaces: one colour and height scale for all methods compared."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlesam.probes.readings import Surface
from fedlesam.report.pictures import COLUMN, PAPER, bare, plain, save_for_paper
from fedlesam.report.style import Look

COLOURS = matplotlib.colormaps["cividis"]
"""Even for colour-blind readers and in print; the same on the page."""
LEVELS = 16
COLUMNS = 4
SHOWN = {1: 0.95, 2: 0.8}
"""By dimensions, the share of all values below the top of the scale; the walls beyond would flatten everything else."""
LETTERS = 22
"""Of a title's line: what has room above a panel."""


def draw(surfaces: Sequence[tuple[str, Look, Surface]], folder: Path) -> list[Path]:
    """Curves of one-dimensional surfaces, contours and heights of two-dimensional ones, as PNG and PDF.

    Args:
        surfaces: Labels, looks and surfaces.
        folder: Where the files go.
    """
    flat = {name: (look, found) for name, look, found in surfaces if found.dims == 1}
    deep = {name: found for name, _, found in surfaces if found.dims == 2}
    with rc_context(PAPER):
        figures = {"surface-1d": curves(flat)} if flat else {}
        if deep:
            figures |= {"surface-2d-contours": contours(deep), "surface-2d-heights": heights(deep)}
        return [path for name, figure in figures.items() for path in save_for_paper(figure, folder, name)]


def scale_of(surfaces: Sequence[Surface]) -> tuple[float, float]:
    """The bottom and the top of a scale for all surfaces.

    Args:
        surfaces: The surfaces.
    """
    values = np.concatenate([found.loss[np.isfinite(found.loss)] for found in surfaces])
    if not len(values):
        return 0.0, 1.0
    shown = max(SHOWN[found.dims] for found in surfaces)
    low, high = float(values.min()), float(np.quantile(values, shown))
    return low, high if high > low else low + 1e-6 + abs(low) * 1e-6


def curves(surfaces: Mapping[str, tuple[Look, Surface]]) -> Figure:
    """Loss and accuracy along one direction.

    Args:
        surfaces: Looks and surfaces by label.
    """
    low, high = scale_of([found for _, found in surfaces.values()])
    rows = -(-len(surfaces) // 4)
    figure = Figure(figsize=(2 * COLUMN, 2.3 + 0.14 * rows), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for name, ((colour, line), found) in surfaces.items():
        finite = np.where(np.isfinite(found.loss), found.loss, np.nan)
        loss.plot(found.x, finite, color=colour, linestyle=line, linewidth=1.0, label=plain(name))
        accuracy.plot(found.x, 100 * found.accuracy, color=colour, linestyle=line, linewidth=1.0)
    loss.set(ylabel="global training loss", ylim=(low - 0.05 * (high - low), high))
    accuracy.set(ylabel="training accuracy (%)")
    for axes in (loss, accuracy):
        axes.set(xlabel="step along the direction")
        bare(axes)
    if len(surfaces) > 1:
        figure.legend(loc="outside lower center", ncol=4, frameon=False, handlelength=2.2, columnspacing=1.0)
    return figure


def contours(surfaces: Mapping[str, Surface]) -> Figure:
    """Contours of two-dimensional surfaces.

    Args:
        surfaces: By label.
    """
    low, high = scale_of(list(surfaces.values()))
    levels = np.linspace(low, high, LEVELS)
    figure, panels = _panels(len(surfaces), 1.75, {})
    for axes, (name, found) in zip(panels, surfaces.items(), strict=True):
        values = np.where(np.isfinite(found.loss), found.loss, 1e30)
        shades = axes.contourf(found.x, found.x, values, levels, cmap=COLOURS, extend="max")
        axes.contour(found.x, found.x, values, levels, colors="white", linewidths=0.25, alpha=0.5)
        axes.plot(0, 0, "+", color="white", markersize=6)
        axes.set(title=_title(name, found), aspect="equal")
        axes.set(xticks=(found.x[0], 0, found.x[-1]), yticks=(found.x[0], 0, found.x[-1]))
        axes.label_outer()
    ticks = [tick for tick in MaxNLocator(7).tick_values(low, high) if low <= tick <= high]
    figure.colorbar(shades, ax=panels, label="global training loss", shrink=0.9, format="%.3g", pad=0.02, ticks=ticks)
    return figure


def heights(surfaces: Mapping[str, Surface]) -> Figure:
    """Two-dimensional surfaces in perspective.

    Args:
        surfaces: By label.
    """
    low, high = scale_of(list(surfaces.values()))
    figure, panels = _panels(len(surfaces), 2.0, {"projection": "3d"})
    for axes, (name, found) in zip(panels, surfaces.items(), strict=True):
        x, y = np.meshgrid(found.x, found.x)
        values = np.clip(np.nan_to_num(found.loss, nan=high, posinf=high), None, high)
        every = {"rstride": 1, "cstride": 1, "linewidth": 0, "antialiased": False}
        drawn = axes.plot_surface(x, y, values, cmap=COLOURS, vmin=low, vmax=high, **every)
        axes.set_title(_title(name, found), pad=-4)
        axes.set(zlim=(low, high))
        axes.set_box_aspect((4, 4, 3), zoom=1.1)
        axes.tick_params(labelsize=6, pad=-3)
        axes.set(xticks=(found.x[0], 0, found.x[-1]), yticks=(found.x[0], 0, found.x[-1]))
        axes.view_init(elev=28, azim=-60)
    figure.colorbar(drawn, ax=panels, label="global training loss", shrink=0.7, format="%.3g", pad=0.06)
    return figure


def _panels(count: int, side: float, kind: dict[str, str]) -> tuple[Figure, list[Any]]:
    columns = 3 if count in (5, 6, 9) else min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(side * columns + 0.8, (side + 0.15) * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, subplot_kw=kind).flatten().tolist()
    for spare in panels[count:]:
        figure.delaxes(spare)
    return figure, panels[:count]


def _title(name: str, found: Surface) -> str:
    """The method, and the loss at its model: the scale hides small differences."""
    centre = float(found.loss[(len(found.x) // 2,) * found.dims])
    return f"{plain(fill(name, LETTERS, break_long_words=False, break_on_hyphens=False))}\ncentre {centre:.3g}"

"""Pictures of loss surfaces: one colour and height scale for all methods compared."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedlesam.probes.surface import Surface
from fedlesam.report.pictures import save
from fedlesam.report.style import style

COLOURS = matplotlib.colormaps["viridis"]
LEVELS = 16
COLUMNS = 4
SHOWN = {1: 0.95, 2: 0.8}
"""By dimensions, the share of all values below the top of the scale; the walls beyond would flatten everything else."""


def draw(surfaces: Sequence[tuple[str, Surface]], folder: Path) -> list[Path]:
    """Curves for one-dimensional ones, contours and heights for two-dimensional ones; PNG and PDF."""
    flat = {name: found for name, found in surfaces if found.dims == 1}
    deep = {name: found for name, found in surfaces if found.dims == 2}
    figures = {"surface-1d": curves(flat)} if flat else {}
    if deep:
        figures |= {"surface-2d-contours": contours(deep), "surface-2d-heights": heights(deep)}
    return [save(figure, folder / f"{name}.{kind}") for name, figure in figures.items() for kind in ("png", "pdf")]


def scale_of(surfaces: Mapping[str, Surface]) -> tuple[float, float]:
    """The bottom and the top of the scale all of them share."""
    values = np.concatenate([found.loss[np.isfinite(found.loss)] for found in surfaces.values()])
    shown = max(SHOWN[found.dims] for found in surfaces.values())
    low, high = float(values.min()), float(np.quantile(values, shown))
    return low, high if high > low else low + 1e-6 + abs(low) * 1e-6


def curves(surfaces: Mapping[str, Surface]) -> Figure:
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for name, found in surfaces.items():
        colour, line = style(name.split()[0], [other.split()[0] for other in surfaces])
        loss.plot(found.x, np.where(np.isfinite(found.loss), found.loss, np.nan), line, color=colour, label=name)
        accuracy.plot(found.x, 100 * found.accuracy, line, color=colour)
    loss.set(xlabel="step along the direction", ylabel="global training loss", ylim=_roomy(scale_of(surfaces)))
    accuracy.set(xlabel="step along the direction", ylabel="training accuracy (%)")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    for axes in (loss, accuracy):
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def contours(surfaces: Mapping[str, Surface]) -> Figure:
    low, high = scale_of(surfaces)
    levels = np.linspace(low, high, LEVELS)
    figure, panels = _panels(len(surfaces), 2.6, {})
    for axes, (name, found) in zip(panels, surfaces.items(), strict=True):
        values = np.where(np.isfinite(found.loss), found.loss, 1e30)
        shades = axes.contourf(found.x, found.x, values, levels, cmap=COLOURS, extend="max")
        axes.contour(found.x, found.x, values, levels, colors="white", linewidths=0.3, alpha=0.6)
        axes.plot(0, 0, "+", color="white", markersize=7)
        axes.set(title=f"{name}, centre {_centre(found):.3f}", aspect="equal")
        axes.title.set_fontsize(9)
    figure.colorbar(shades, ax=panels, label="global training loss", shrink=0.9, format="%.3g")
    return figure


def heights(surfaces: Mapping[str, Surface]) -> Figure:
    low, high = scale_of(surfaces)
    figure, panels = _panels(len(surfaces), 3.2, {"projection": "3d"})
    for axes, (name, found) in zip(panels, surfaces.items(), strict=True):
        x, y = np.meshgrid(found.x, found.x)
        values = np.clip(np.nan_to_num(found.loss, nan=high, posinf=high), None, high)
        drawn = axes.plot_surface(
            x, y, values, cmap=COLOURS, vmin=low, vmax=high, rstride=1, cstride=1, linewidth=0, antialiased=False
        )
        axes.set(title=f"{name}, centre {_centre(found):.3f}", zlim=(low, high))
        axes.title.set_fontsize(9)
        axes.tick_params(labelsize=7, pad=-1)
        axes.set(xticks=(found.x[0], 0, found.x[-1]), yticks=(found.x[0], 0, found.x[-1]))
        axes.view_init(elev=28, azim=-60)
    figure.colorbar(drawn, ax=panels, label="global training loss", shrink=0.7, pad=0.04)
    return figure


def _panels(count: int, side: float, kind: dict[str, str]) -> tuple[Figure, list[Any]]:
    columns = 3 if count in (5, 6, 9) else min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(side * columns + 1.0, side * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, subplot_kw=kind).flatten().tolist()
    for spare in panels[count:]:
        figure.delaxes(spare)
    return figure, panels[:count]


def _centre(found: Surface) -> float:
    return float(found.loss[(len(found.x) // 2,) * found.dims])


def _roomy(scale: tuple[float, float]) -> tuple[float, float]:
    low, high = scale
    return low - 0.05 * (high - low), high

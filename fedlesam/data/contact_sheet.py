"""A picture of a few images of every class: the quickest way to see that data is what it is thought to be."""

import contextlib
import math
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from fedlesam.data.dataset import DataSet

ROWS = 20
"""Classes in a column of the sheet."""
CLASSES = 100
"""At most on a sheet; the title says so."""
ROW, LABEL, TITLE, MARGIN = 0.55, 1.4, 0.4, 0.1
"""Inches: height of a row, width of the class names, height of the title, space at the right and below."""
NAME = 18
"""Letters of a class name."""


def contact_sheet(data: DataSet, path: Path, per_class: int = 10) -> Path:
    """Write a PNG with the first `per_class` training images of each class in a row beside its name."""
    shown = min(len(data.classes), CLASSES)
    columns = math.ceil(shown / ROWS)
    rows = math.ceil(shown / columns)
    _, height, width = data.shape
    strip = min(ROW * per_class * width / height, 12)
    page = (columns * (LABEL + strip) + MARGIN, rows * ROW + TITLE + MARGIN)
    figure = Figure(figsize=page, dpi=100)
    FigureCanvasAgg(figure)
    numbers = torch.bincount(data.train.y, minlength=len(data.classes)).tolist()
    for number in range(shown):
        left, top = (number // rows) * (LABEL + strip) + LABEL, TITLE + (number % rows) * ROW
        bottom = page[1] - top - ROW
        axis = figure.add_axes((left / page[0], bottom / page[1], strip / page[0], 0.94 * ROW / page[1]))
        axis.set_axis_off()
        axis.imshow(_strip(data, number, per_class), vmin=0, vmax=1, interpolation="nearest", aspect="equal")
        axis.text(
            -0.05 / strip, 0.5, f"{_short(data.classes[number])}\n{numbers[number]:,}",
            transform=axis.transAxes, ha="right", va="center", fontsize=8, parse_math=False,
        )  # fmt: skip
    channels = data.shape[0]
    title = f"{data.name}: {len(data.train):,} training images, {channels} x {height} x {width}"
    if shown < len(data.classes):
        title += f"; the first {shown} of {len(data.classes)} classes"
    figure.text(0.5, 1 - TITLE / 2 / page[1], title, ha="center", va="center", fontsize=10, parse_math=False)
    return _write(figure, Path(path))


def _write(figure: Figure, path: Path) -> Path:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, format="png")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ValueError(f"{path}: cannot be written: {error.strerror or error}; choose another place") from error
    return path


def _short(name: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    return printable if len(printable) <= NAME else printable[: NAME - 1] + "…"


def _strip(data: DataSet, number: int, per_class: int) -> npt.NDArray[Any]:
    """Images side by side, between them a pixel of white; missing ones are white."""
    chosen = torch.nonzero(data.train.y == number).flatten()[:per_class]
    images = [_picture(data, image) for image in data.train.x[chosen]]
    _, height, width = data.shape
    strip = np.ones((height, per_class * (width + 1) - 1, 3), np.float32)
    for i, image in enumerate(images):
        strip[:, i * (width + 1) : i * (width + 1) + width] = image
    return strip


def _picture(data: DataSet, image: Tensor) -> npt.NDArray[Any]:
    """0 to 1, height x width x colours; other than one or three channels are shown as their mean."""
    x = image.float()
    if image.is_floating_point():
        low, high = x.amin(), x.amax()
        x = (x - low) / (high - low).clamp_min(1e-12)
    else:
        x = x / data.scale
    x = x if len(x) in (1, 3) else x.mean(0, keepdim=True)
    return np.asarray(x.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy())

"""The loss around the weights, along one or two random directions.

Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018: every filter of a direction has the norm of the
same filter of the weights, so a step of 1 is as long as the weights are, whatever their scale. The random numbers
depend on the seed and the model's shape alone: all methods compared look along the same ones, each scaled to itself.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.checks import check_count, check_number
from fedlesam.probes.base import Tick
from fedlesam.probes.loss import GlobalLoss

SECONDS_BETWEEN_SAVES = 10.0
OLD_KEY = "about"
"""The key of the metadata in older files."""


@dataclass(frozen=True)
class Grid:
    """Where to evaluate: `points` along each of `dims` directions, from -span to span."""

    dims: int = 2
    points: int = 25
    span: float = 1.0
    samples: int = 1000
    """About so many training samples, as many of each client; 0 takes all."""
    seed: int = 0
    """Of the directions."""

    def __post_init__(self) -> None:
        check_count("surface", "samples", self.samples, at_least=0)
        check_count("surface", "seed", self.seed, at_least=0)
        check_number("surface", "span", self.span, above=0)
        if self.dims not in (1, 2):
            raise ValueError(f"surface: dims must be 1 or 2, got {self.dims}")
        check_count("surface", "points", self.points, at_least=3)
        if self.points % 2 == 0:
            raise ValueError(f"surface: points must be odd, so that the model itself is one, got {self.points}")

    @property
    def axis(self) -> NDArray[np.float64]:
        half = self.points // 2
        return np.asarray(np.arange(-half, half + 1) * (self.span / half), dtype=np.float64)


@dataclass(frozen=True)
class Surface:
    """Loss and accuracy on a grid; two-dimensional ones are indexed [y, x]."""

    x: NDArray[np.float64]
    loss: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    metadata: dict[str, Any]

    @property
    def dims(self) -> int:
        return self.loss.ndim


def directions(weights: Tensor, shapes: Sequence[torch.Size], count: int, seed: int = 0) -> list[Tensor]:
    """Filter-normalised random directions. Vectors (biases, norms' scales) are left alone, as Li et al. do."""
    found = []
    for number in range(count):
        rng, pieces = seeds.generator(seed, "probe", number), []
        sizes = [shape.numel() for shape in shapes]
        for piece, shape in zip(torch.split(weights.cpu(), sizes), shapes, strict=True):
            noise = torch.randn(shape, generator=rng).to(weights.dtype)
            if len(shape) < 2:
                pieces.append(torch.zeros_like(piece))
                continue
            rows, filters = noise.flatten(1), piece.view(shape).flatten(1)
            lengths = filters.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
            pieces.append((rows * lengths).flatten())
        found.append(torch.cat(pieces).to(weights.device))
    return found


def surface_of(
    loss: GlobalLoss,
    weights: Tensor,
    grid: Grid,
    path: Path | None = None,
    metadata: dict[str, Any] | None = None,
    tick: Tick = lambda done, of: None,
) -> Surface:
    """Evaluate F on a grid around the weights.

    With a `path` it is resumable: what is done lies beside it, also after Ctrl-C, and is taken up by the same call; a
    finished file of the same weights and grid is read.
    """
    axes = directions(weights, loss.model.shapes, grid.dims, grid.seed)
    known = {
        "dims": grid.dims,
        "points": grid.points,
        "span": grid.span,
        "samples": loss.samples,
        "directions_seed": grid.seed,
        "directions": "random, filter-normalised; vectors left out",
        "weights": hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:16],
        **(metadata or {}),
    }
    part = path.with_name(f".{path.stem}.part{path.suffix}") if path is not None else None
    for file in (path, part):
        earlier = read(file) if file is not None and file.exists() else None
        if earlier is not None and earlier.metadata == known:
            break
        earlier = None
    shape = (grid.points,) * grid.dims
    found = earlier or Surface(grid.axis, np.full(shape, np.nan), np.full(shape, np.nan), known)
    done = ~np.isnan(found.loss)
    places, saved = [place for place in np.ndindex(shape) if not done[place]], time.monotonic()
    try:
        for place in places:
            steps = [found.x[i] for i in reversed(place)]
            there = weights.clone()
            for step, axis in zip(steps, axes, strict=True):
                there.add_(axis, alpha=float(step))
            found.loss[place], found.accuracy[place] = loss.score(there)
            if math.isnan(found.loss[place]):
                found.loss[place] = math.inf
            done[place] = True
            tick(int(done.sum()), done.size)
            if part is not None and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                write(found, part)
                saved = time.monotonic()
    finally:
        if part is not None and not done.all() and done.any():
            write(found, part)
    if path is not None and part is not None:
        if places or not path.exists() or earlier is None:
            write(found, path)
        part.unlink(missing_ok=True)
    return found


def write(found: Surface, path: Path) -> None:
    beside = path.with_name(path.name + ".new")
    axes = {"x": found.x} if found.dims == 1 else {"x": found.x, "y": found.x.copy()}
    tensors = {**axes, "loss": found.loss, "accuracy": found.accuracy}
    save_file(tensors, str(beside), metadata={"metadata": json.dumps(found.metadata)})
    beside.replace(path)


def read(path: Path) -> Surface:
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_tensor(name) for name in ("x", "loss", "accuracy")}
            header = file.metadata() or {}
            metadata = json.loads(header.get("metadata") or header[OLD_KEY])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: is not a loss surface: {error}; delete it and measure again") from error
    return Surface(**parts, metadata=metadata)

"""The loss around the weights, along one or two random directions.

Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018: every filter of a direction has the norm of the
same filter of the weights, so a step of 1 is as long as the weights are, whatever their scale. The random numbers
depend on the seed and the model's shape alone: all methods compared look along the same ones, each scaled to itself.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.checks import check_params, param
from fedlesam.probes.base import Tick
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.readings import Surface, read_surface, write_surface

SECONDS_BETWEEN_SAVES = 10.0


@dataclass(frozen=True)
class Grid:
    """Where to evaluate a surface: from -span to span along each direction.

    Args:
        dims: Directions, 1 or 2.
        points: Along each direction; odd, so that the model itself is one.
        span: The largest step; 1 is as long as the weights.
        samples: About how many training samples to use, the same number of each client; 0 takes all.
        seed: Of the directions.
    """

    dims: int = param(2, at_least=1, at_most=2, whole=True)
    points: int = param(25, at_least=3, whole=True)
    span: float = param(1.0, above=0)
    samples: int = param(1000, at_least=0, whole=True)
    seed: int = param(0, at_least=0, whole=True)

    def __post_init__(self) -> None:
        check_params(self, "surface")
        if self.points % 2 == 0:
            raise ValueError(f"surface: points must be odd, so that the model itself is one, got {self.points}")

    @property
    def axis(self) -> NDArray[np.float64]:
        """The steps along a direction."""
        half = self.points // 2
        return np.asarray(np.arange(-half, half + 1) * (self.span / half), dtype=np.float64)


def directions(weights: Tensor, shapes: Sequence[torch.Size], count: int, seed: int = 0) -> list[Tensor]:
    """Filter-normalised random directions; 0 for vectors (biases, scales of norms), as Li et al. do.

    Args:
        weights: Of the model, flat.
        shapes: Of its parameters.
        count: How many directions.
        seed: Of the random numbers.
    """
    found = []
    for number in range(count):
        rng, pieces, sizes = seeds.generator(seed, "probe", number), [], [shape.numel() for shape in shapes]
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
    """Evaluate the loss on a grid around the weights.

    Args:
        loss: The global loss.
        weights: The centre, flat.
        grid: Where to evaluate.
        path: The file of the surface. An interrupted call is resumed by the next one, from a hidden file in the same
            folder; a finished file of the same weights and grid is read.
        metadata: More to be stored with the surface.
        tick: Called after every point.
    """
    axes = directions(weights, loss.model.shapes, grid.dims, grid.seed)
    known = {
        **{name: getattr(grid, name) for name in ("dims", "points", "span")},
        "samples": loss.samples,
        "directions_seed": grid.seed,
        "directions": "random, filter-normalised; vectors left out",
        "weights": hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:16],
        **(metadata or {}),
    }
    part = path.with_name(f".{path.stem}.part{path.suffix}") if path is not None else None
    kept = (read_surface(file) for file in (path, part) if file is not None and file.exists())
    earlier = next((surface for surface in kept if surface.metadata == known), None)
    shape = (grid.points,) * grid.dims
    found = earlier or Surface(grid.axis, np.full(shape, np.nan), np.full(shape, np.nan), known)
    done = ~np.isnan(found.loss)
    places, saved = [place for place in np.ndindex(shape) if not done[place]], time.monotonic()
    try:
        for place in places:
            there = weights.clone()
            for i, axis in zip(reversed(place), axes, strict=True):
                there.add_(axis, alpha=float(found.x[i]))
            value, found.accuracy[place] = loss.score(there)
            found.loss[place] = math.inf if math.isnan(value) else value
            done[place] = True
            tick(int(done.sum()), done.size)
            if part is not None and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                write_surface(found, part)
                saved = time.monotonic()
    finally:
        if part is not None and not done.all() and done.any():
            write_surface(found, part)
    if path is not None and part is not None:
        if places or not path.exists() or earlier is None:
            write_surface(found, path)
        part.unlink(missing_ok=True)
    return found

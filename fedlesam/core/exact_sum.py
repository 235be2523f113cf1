"""A sum of vectors that has the same bits in any order: in 64-bit fixed point, since integers add exactly."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SCALE = 2.0**40
"""Steps per unit: a resolution of 9e-13."""

RANGE = 2.0**22
"""The largest sum, 4e6, a bit below what 64-bit integers hold at this scale."""

LOW = 31
"""Bits of the lower half of a sum by examples; the upper half has as many."""

MOST = 1 << LOW
"""Examples that can be weighted in a round: neither half can wrap."""

WHOLE = 2.0**53
"""Doubles below it hold integers exactly, so sums of such integers have the same bits in any order."""

CHUNK = 1 << 16
"""Entries converted at a time: they stay in the cache, and no second vector of the model's size is made."""


class ExactSum:
    """The sum of weight * x over vectors x.

    Args:
        like: a vector of the same size and device.
        wide: use two integers per entry, for weights by examples. One is enough for a plain mean; with weights it would
            lose range, and a scale that depends on the active clients would give other bits when one of them fails.
    """

    def __init__(self, like: Tensor, wide: bool = False) -> None:
        self.wide, self.shape, self.device = wide, like.shape, like.device
        self._total: Tensor | None = None
        self._whole: Tensor | None = None
        """The sum in double precision, while nothing else was added."""

    @property
    def total(self) -> Tensor:
        """The integers, which may be added to."""
        if self._total is None:
            whole, size = self._whole, (1 + self.wide) * self.shape.numel()
            zeros = torch.zeros(size, dtype=torch.int64, device=self.device) if whole is None else whole.to(torch.int64)
            self._total, self._whole = zeros, None
        return self._total

    def _halves(self) -> tuple[Tensor, ...]:
        return self.total.chunk(2) if self.wide else (self.total,)

    def _parts(self) -> tuple[Tensor, ...]:
        """To be read."""
        return self._halves() if self._whole is None else (self._whole,)

    def add(self, x: Tensor, weight: int, bound: float = math.inf) -> Tensor:
        """Add weight * x, which must be finite and in range; norm(x)^2 in double precision comes out of the same pass.

        Args:
            x: a vector.
            weight: an integer.
            bound: its largest entry times all weights of the sum together. Below RANGE the lower half can hold it.
        """
        square: Tensor | None = None
        halves = (_pieces(half, CHUNK) for half in self._halves())
        for *into, part in zip(*halves, _pieces(x.reshape(-1), CHUNK), strict=True):
            precise = part.to(torch.float64, copy=True)
            square = _added(square, torch.dot(precise, precise))
            fixed = precise.mul_(SCALE).round_().to(torch.int64)
            if self.wide and bound >= RANGE:
                into[-1].add_(fixed & (MOST - 1), alpha=weight)
                fixed >>= LOW
                into[0].add_(fixed, alpha=weight)
            else:
                into[-1].add_(fixed, alpha=weight)
        assert square is not None
        return square

    def add_rows(self, rows: Tensor, weights: Sequence[int], largest: float = RANGE) -> None:
        """Add several vectors at once, as `add` would one by one.

        Args:
            rows: a vector each.
            weights: an integer each.
            largest: no entry is larger.
        """
        count = len(weights)
        factors = None if set(weights) == {1} else torch.tensor(weights, device=rows.device)[:, None]
        width, rows = max(1, CHUNK // count), rows.reshape(count, -1)
        small = factors is None and not self.wide and adds_exactly(count, largest)
        for *into, part in zip(*(_pieces(half, width) for half in self._halves()), _pieces(rows, width), strict=True):
            fixed = in_fixed_point(part)
            if small:
                into[0].add_(fixed.sum(0).to(torch.int64))
                continue
            fixed = fixed.to(torch.int64)
            parts = (fixed >> LOW, fixed & (MOST - 1)) if self.wide else (fixed,)
            for total, each in zip(into, parts, strict=True):
                total.add_((each if factors is None else each * factors).sum(0))

    def add_whole(self, total: Tensor) -> None:
        """Add a sum of vectors in fixed point.

        Args:
            total: whole numbers in double precision, for which `adds_exactly` holds, added to 0, so that none is -0.
                They are not to be changed.
        """
        if self._total is None and self._whole is None and not self.wide:
            self._whole = total.reshape(-1)
        else:
            self._halves()[-1].add_(total.reshape(-1).to(torch.int64))

    def mean(self, weight: int, dtype: torch.dtype) -> Tensor:
        """The sum divided by a weight.

        Args:
            weight: the sum of all weights.
            dtype: of the result.
        """
        halves = self._parts()
        out = torch.empty(halves[0].shape, dtype=dtype, device=self.device)
        for into, *parts in zip(_pieces(out, CHUNK), *(_pieces(half, CHUNK) for half in halves), strict=True):
            into.copy_(_as_float(parts).div(SCALE * weight))
        return out.reshape(self.shape)

    def pull(self, weight: int, landed: Tensor, anchor: Tensor) -> float:
        """2 (mean . moved) - moved . moved, in double precision, where moved = landed - anchor.

        Args:
            weight: the sum of all weights.
            landed: a vector.
            anchor: a vector.
        """
        mean: Tensor | None = None
        move: Tensor | None = None
        parts = (_pieces(part, CHUNK) for part in self._parts())
        ends = (_pieces(end, CHUNK) for end in (landed, anchor))
        for after, before, *into in zip(*ends, *parts, strict=True):
            moved = (after - before).double()
            mean, move = _added(mean, torch.dot(_as_float(into), moved)), _added(move, torch.dot(moved, moved))
        assert mean is not None and move is not None
        return float(mean.mul_(2 / (SCALE * weight)).sub_(move))


def in_fixed_point(x: Tensor) -> Tensor:
    """The whole numbers of steps that a vector has, in double precision.

    Args:
        x: a vector, or several.
    """
    return x.to(torch.float64, copy=True).mul_(SCALE).round_()


def adds_exactly(count: int, largest: float) -> bool:
    """Whether double precision holds the sum of so many vectors in fixed point exactly.

    Args:
        count: of the vectors.
        largest: no entry is larger.
    """
    return count * largest * SCALE < WHOLE


def _pieces(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Parts of its last dimension; `split` is slow where there is only one."""
    return (x,) if x.shape[-1] <= width else torch.split(x, width, dim=-1)


def _added(total: Tensor | None, value: Tensor) -> Tensor:
    """A sum that begins with its first value, in place: small tensors that stay would cut up memory that is freed."""
    return value if total is None else total.add_(value)


def _as_float(parts: Sequence[Tensor]) -> Tensor:
    """The integers of a sum as floating-point numbers, still scaled; the same ones however the halves divide it."""
    if len(parts) == 1:
        return parts[0].double()
    high, low = parts
    return (high + (low >> LOW)).double().mul_(MOST).add_(low & (MOST - 1))

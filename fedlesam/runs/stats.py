"""Two methods on the same seeds: how far apart, how sure, and what would have gone unseen. No SciPy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

import numpy as np


@dataclass(frozen=True)
class Number:
    mean: float
    spread: float | None
    """Standard deviation over seeds; None with one."""


def number(values: list[float]) -> Number | None:
    return Number(fmean(values), stdev(values) if len(values) > 1 else None) if values else None


ALPHA = 0.05
LEVEL = 1 - ALPHA
POWER = 0.8
DRAWS = 10_000
"""Of the bootstrap, and of the permutation test where not all sign flips can be tried."""
EXACT = 16
"""Up to so many pairs all 2^n sign flips are tried."""


@dataclass(frozen=True)
class Pairs:
    """Differences, one a seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Percentiles of the bootstrapped mean, from a fixed seed."""
        drawn = np.random.default_rng(0).choice(self.values, (DRAWS, len(self.values)))
        low, high = np.quantile(drawn.mean(1), [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def p(self) -> float:
        """Two-sided, of the sign-flip permutation test: if the methods are alike, each sign could be the other."""
        values, n = np.array(self.values), len(self.values)
        if n <= EXACT:
            signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        else:
            signs = np.random.default_rng(0).choice([-1, 1], (DRAWS, n))
        sums = np.abs(signs @ values)
        as_far = int((sums >= abs(values.sum()) - 1e-9 * np.abs(values).sum()).sum())
        return as_far / 2**n if n <= EXACT else (as_far + 1) / (DRAWS + 1)

    def detectable(self, level: float = LEVEL, power: float = POWER) -> float | None:
        """The smallest true difference a paired t-test on so many seeds would see with this probability."""
        n = len(self.values)
        if n < 2:
            return None
        return (student((1 + level) / 2, n - 1) + student(power, n - 1)) * stdev(self.values) / sqrt(n)


def pairs(left: Mapping[int, float], right: Mapping[int, float]) -> Pairs:
    """left - right on the seeds both have."""
    return Pairs(tuple(left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())))


def student(probability: float, freedom: int) -> float:
    """Quantile of Student's t: with t = sqrt(freedom) tan(a), the density of a is cos(a)^(freedom - 1)."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    below = np.cumsum(np.cos(angle) ** (freedom - 1))
    return float(sqrt(freedom) * np.tan(np.interp(probability, below / below[-1], angle)))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction over a family: the k-th smallest of m times m - k + 1, never below the one before."""
    found, floor = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        floor = max(floor, min(1.0, ps[i] * (len(ps) - rank)))
        found[i] = floor
    return found


def verdict(mean: float, corrected: float) -> str:
    """Of a claim that the mean difference is above 0."""
    if corrected >= ALPHA:
        return "not confirmed"
    return "confirmed" if mean > 0 else "refuted"

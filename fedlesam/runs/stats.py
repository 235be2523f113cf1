"""Statistics over seeds: means, and differences of two methods that are paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95
POWER = 0.8
RESAMPLES = 2**16
"""Of the permutation test, which is exact for up to 16 pairs: it then tries all 2^n sign flips."""
DIGITS = 12
"""Sums that agree to so many digits are equal: they differ by rounding errors alone."""


@dataclass(frozen=True)
class SeedMean:
    """A value over seeds."""

    mean: float
    spread: float | None
    """Standard deviation over seeds; None with one."""


def seed_mean(values: Sequence[float]) -> SeedMean | None:
    """None of no values.

    Args:
        values: One per seed.
    """
    return SeedMean(fmean(values), stdev(values) if len(values) > 1 else None) if values else None


@dataclass(frozen=True)
class PairedDifferences:
    """Differences of two methods, one per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.values)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Student's t-interval of the mean difference; needs two seeds.

        Args:
            level: The confidence.
        """
        half = self._quantile((1 + level) / 2) * self._standard_error
        return self.mean - half, self.mean + half

    def p_value(self) -> float:
        """Two-sided, of the sign-flip permutation test; from a fixed seed where not all flips are tried."""
        scale = sum(map(abs, self.values))
        if not scale:
            return 1.0

        def total(values: Any, axis: int = -1) -> Any:
            return np.round(np.sum(values, axis=axis) / scale, DIGITS)

        found = stats.permutation_test(
            (np.array(self.values),),
            total,
            permutation_type="samples",
            vectorized=True,
            n_resamples=RESAMPLES,
            random_state=np.random.default_rng(0),
        )
        return float(found.pvalue)

    def detectable(self, level: float = LEVEL, power: float = POWER) -> float:
        """The smallest true difference that a paired t-test on so many seeds finds with this probability.

        Args:
            level: The confidence.
            power: With which it is found.
        """
        return (self._quantile((1 + level) / 2) + self._quantile(power)) * self._standard_error

    @property
    def _standard_error(self) -> float:
        return stdev(self.values) / sqrt(len(self.values))

    def _quantile(self, probability: float) -> float:
        return float(stats.t.ppf(probability, len(self.values) - 1))


def paired(left: Mapping[int, float], right: Mapping[int, float]) -> PairedDifferences:
    """left - right on the seeds both have.

    Args:
        left: Values by seed.
        right: Values by seed.
    """
    return PairedDifferences(tuple(left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction over a family: the k-th smallest of m times m - k + 1, never below the one before.

    Args:
        p_values: Those of the family.
    """
    found, floor = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        floor = max(floor, min(1.0, p_values[i] * (len(p_values) - rank)))
        found[i] = floor
    return found

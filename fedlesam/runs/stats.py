"""Statistics over seeds: means, and differences of two methods that are paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class SeedMean:
    """A value over seeds."""

    mean: float
    """Over seeds."""
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
    """Left minus right, in the order of the seeds that both have."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.values)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Student's t-interval of the mean difference; needs two seeds.

        Args:
            level: The confidence.
        """
        count = len(self.values)
        half = float(stats.t.ppf((1 + level) / 2, count - 1)) * stdev(self.values) / sqrt(count)
        return self.mean - half, self.mean + half


def paired(left: Mapping[int, float], right: Mapping[int, float]) -> PairedDifferences:
    """left - right on the seeds both have.

    Args:
        left: Values by seed.
        right: Values by seed.
    """
    return PairedDifferences(tuple(left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())))

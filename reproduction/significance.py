"""How sure a difference between two methods is: a permutation test, Holm's correction, what could have been seen."""

from collections.abc import Sequence
from math import sqrt
from statistics import stdev
from typing import Any

import numpy as np
from scipy import stats

from fedlesam.runs.stats import LEVEL, PairedDifferences

POWER = 0.8
RESAMPLES = 2**16
"""Of the permutation test, which is exact for up to 16 pairs: it then tries all 2^n sign flips."""
DIGITS = 12
"""Sums that agree to so many digits are equal: they differ by rounding errors alone."""


def p_value(differences: PairedDifferences) -> float:
    """Two-sided, of the sign-flip permutation test; from a fixed seed where not all flips are tried.

    Args:
        differences: One per seed.
    """
    scale = sum(map(abs, differences.values))
    if not scale:
        return 1.0

    def total(values: Any, axis: int = -1) -> Any:
        return np.round(np.sum(values, axis=axis) / scale, DIGITS)

    found = stats.permutation_test(
        (np.array(differences.values),),
        total,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(0),
    )
    return float(found.pvalue)


def t_test(differences: PairedDifferences) -> float:
    """Two-sided p of the paired t-test: for fewer seeds than the permutation test can decide with.

    Args:
        differences: One per seed, two or more.
    """
    spread = stdev(differences.values)
    if not spread:
        return float(differences.mean == 0)
    count = len(differences.values)
    return float(2 * stats.t.sf(abs(differences.mean) * sqrt(count) / spread, count - 1))


def detectable(differences: PairedDifferences, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest true difference that a paired t-test on so many seeds finds with this probability.

    Args:
        differences: One per seed.
        level: The confidence.
        power: With which it is found.
    """
    count = len(differences.values)
    quantiles = stats.t.ppf([(1 + level) / 2, power], count - 1)
    return float(quantiles.sum()) * stdev(differences.values) / sqrt(count)


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

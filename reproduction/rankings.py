"""How far two orders of the same methods agree."""

from collections.abc import Mapping
from math import isnan

from scipy import stats


def kendall_tau(left: Mapping[str, float], right: Mapping[str, float]) -> float | None:
    """Kendall's tau-b over the names both have: 1 the same order, -1 the opposite; corrected for ties.

    None where there is nothing to compare: fewer than two names, or all equal on one side.
    """
    names = [name for name in left if name in right]
    if len(names) < 2:
        return None
    tau = float(stats.kendalltau([left[name] for name in names], [right[name] for name in names]).statistic)
    return None if isnan(tau) else tau


def places(values: Mapping[str, float]) -> dict[str, int]:
    """1 for the largest; equal values share a place."""
    ranks = stats.rankdata([-value for value in values.values()], method="min")
    return {name: int(rank) for name, rank in zip(values, ranks, strict=True)}

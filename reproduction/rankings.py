"""How far two orders of the same methods agree."""

from collections.abc import Mapping
from itertools import combinations
from math import sqrt


def kendall_tau(left: Mapping[str, float], right: Mapping[str, float]) -> float | None:
    """Kendall's tau-b over the names both have: 1 the same order, -1 the opposite, ties counted out on their side.

    None where there is nothing to compare: fewer than two names, or all equal on one side.
    """
    names = [name for name in left if name in right]
    same = untied_left = untied_right = 0
    for one, other in combinations(names, 2):
        a, b = _sign(left[one] - left[other]), _sign(right[one] - right[other])
        same += a * b
        untied_left += abs(a)
        untied_right += abs(b)
    return same / sqrt(untied_left * untied_right) if untied_left and untied_right else None


def places(values: Mapping[str, float]) -> dict[str, int]:
    """1 for the largest; equal values share a place."""
    return {name: 1 + sum(other > value for other in values.values()) for name, value in values.items()}


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)

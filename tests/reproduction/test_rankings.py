"""Kendall's tau against scipy's, and by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from reproduction.rankings import kendall_tau, places


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_it_is_scipys_with_ties(pairs: list[tuple[int, int]]) -> None:
    left = {str(i): float(a) for i, (a, _) in enumerate(pairs)}
    right = {str(i): float(b) for i, (_, b) in enumerate(pairs)}
    ours = kendall_tau(left, right)
    if len(pairs) < 2:
        assert ours is None
        return
    theirs = float(stats.kendalltau(list(left.values()), list(right.values())).statistic)
    assert (ours is None) if math.isnan(theirs) else ours == pytest.approx(theirs)


def test_by_hand() -> None:
    """Of the three pairs two agree: (2 - 1) / 3. Names only one side has do not count."""
    assert kendall_tau({"a": 3, "b": 2, "c": 1, "x": 9}, {"c": 1, "a": 2, "b": 3, "y": 0}) == pytest.approx(1 / 3)
    assert kendall_tau({"a": 1, "b": 2}, {"a": 2, "b": 1}) == -1


def test_places_are_shared() -> None:
    assert places({"a": 1.0, "b": 3.0, "c": 3.0, "d": 2.0}) == {"b": 1, "c": 1, "d": 3, "a": 4}


def test_nearly_equal_is_not_equal() -> None:
    """Full precision: a difference that no table prints still makes an order."""
    assert kendall_tau({"a": 1.0, "b": 1.0 + 1e-12}, {"a": 1.0, "b": 2.0}) == 1
    assert places({"a": 1.0, "b": 1.0 + 1e-12}) == {"b": 1, "a": 2}

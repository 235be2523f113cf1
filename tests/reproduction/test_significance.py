"""The permutation test, Holm's correction and what could have been seen, against numbers found by hand and SciPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedlesam.runs.stats import PairedDifferences
from reproduction.significance import RESAMPLES, detectable, holm, p_value, t_test

EXACT = 16


def test_three_pairs_by_hand() -> None:
    """1, 2, 4: of the eight sums of signs only 7 and -7 are as far from 0 as 7; as far as 5 are four."""
    assert p_value(PairedDifferences((1.0, 2.0, 4.0))) == 2 / 8
    assert p_value(PairedDifferences((-1.0, 2.0, 4.0))) == 4 / 8
    assert p_value(PairedDifferences((0.0, 0.0))) == 1.0
    assert p_value(PairedDifferences((1.0, -1.0))) == 1.0


def test_the_t_test_is_scipys_and_needs_no_spread() -> None:
    values = (0.3, -0.1, 0.8, 0.4, 0.2)
    assert t_test(PairedDifferences(values)) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert t_test(PairedDifferences((0.0, 0.0))) == 1.0
    assert t_test(PairedDifferences((0.5, 0.5))) == 0.0


@pytest.mark.parametrize("unit", [0.1, 100 / 360])
def test_ties_are_ties_whatever_the_rounding_errors(unit: float) -> None:
    """Multiples of a unit: as floats, sums that are equal differ in their last bits."""
    signs = 1 - 2 * ((np.arange(64)[:, None] >> np.arange(6)) & 1)
    drawn = np.random.default_rng(0).integers(-40, 41, (50, 6))
    for whole in ([-19, -34, -7, 7, 34, 19], *drawn.tolist()):
        expected = (np.abs(signs @ np.array(whole)) >= abs(sum(whole))).mean()
        assert p_value(PairedDifferences(tuple(unit * value for value in whole))) == pytest.approx(expected)


def test_small_differences_are_no_ties() -> None:
    """Full precision counts: 1e-9 more is more."""
    assert p_value(PairedDifferences((1.0, 1.0 + 1e-9, 2.0))) == 2 / 8
    assert p_value(PairedDifferences((-1.0, 1.0 + 1e-9, 0.0))) == 1.0
    assert p_value(PairedDifferences((1.0, -1.0 - 1e-9, 3.0))) == 6 / 8
    assert p_value(PairedDifferences((-1.0, 1.0 + 1e-9, 3.0))) == 4 / 8


def test_many_pairs_are_drawn() -> None:
    """Beyond 16 pairs by Monte Carlo, near the exact answer, the same every time, never 0."""
    values = tuple(np.random.default_rng(1).normal(0.3, 1, EXACT + 1))
    signs = 1 - 2 * np.array(np.unravel_index(np.arange(2 ** len(values)), (2,) * len(values))).T
    exact = (np.abs(signs @ values) >= abs(sum(values)) - 1e-12).mean()
    assert p_value(PairedDifferences(values)) == pytest.approx(exact, abs=0.015)
    assert p_value(PairedDifferences(values)) == p_value(PairedDifferences(values))
    assert 0 < p_value(PairedDifferences((1.0,) * 30)) <= 2 / (RESAMPLES + 1)


def test_what_could_have_been_seen_is_seen() -> None:
    """Ten pairs of deviation 1: of many samples shifted by the detectable difference about 80 % are significant."""
    rng = np.random.default_rng(2)
    base = rng.normal(size=10)
    base = (base - base.mean()) / base.std(ddof=1)
    shift = detectable(PairedDifferences(tuple(base)))
    assert shift == pytest.approx((2.2622 + 0.8834) / 10**0.5, rel=1e-3)
    seen = stats.ttest_1samp(rng.normal(shift, 1, (4000, 10)), 0, axis=1).pvalue < 0.05
    assert seen.mean() == pytest.approx(0.8, abs=0.03)


def test_holm_by_hand() -> None:
    """Sorted .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 (not below the one before) .06."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(ps: list[float]) -> None:
    found = holm(ps)
    for i, p in enumerate(ps):
        assert p <= found[i] <= min(1, len(ps) * p) or found[i] in found[:i] + found[i + 1 :]
        assert all(found[i] <= found[j] for j, q in enumerate(ps) if p <= q)

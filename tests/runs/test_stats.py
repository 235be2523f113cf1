"""The statistics against SciPy and against numbers found by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlesam.runs.stats import EXACT, Pairs, holm, pairs, student, verdict

DIFFERENCES = (0.3, -0.1, 0.4, 0.2, 0.5, 0.1, -0.2, 0.6)


def test_paired_by_seed() -> None:
    assert pairs({0: 3.0, 1: 5.0, 2: 9.0}, {2: 4.0, 1: 4.5, 7: 0.0}).values == (0.5, 5.0)


def test_three_pairs_by_hand() -> None:
    """1, 2, 4: of the eight sums of signs only 7 and -7 are as far from 0 as 7; as far as 5 are four."""
    assert Pairs((1.0, 2.0, 4.0)).p() == 2 / 8
    assert Pairs((-1.0, 2.0, 4.0)).p() == 4 / 8
    assert Pairs((0.0, 0.0)).p() == 1.0


def test_the_permutation_test_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is an extra")
    expected = stats.permutation_test((np.array(DIFFERENCES),), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert Pairs(DIFFERENCES).p() == pytest.approx(expected.pvalue)


def test_many_pairs_are_drawn() -> None:
    """Beyond 16 pairs by Monte Carlo, near the exact answer, the same every time, never 0."""
    values = tuple(np.random.default_rng(1).normal(0.3, 1, EXACT + 1))
    signs = 1 - 2 * np.array(np.unravel_index(np.arange(2 ** len(values)), (2,) * len(values))).T
    exact = (np.abs(signs @ values) >= abs(sum(values)) - 1e-12).mean()
    assert Pairs(values).p() == pytest.approx(exact, abs=0.015)
    assert Pairs(values).p() == Pairs(values).p()
    assert Pairs((1.0,) * 30).p() == 1 / 10_001


def test_the_bootstrap_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is an extra")
    method = {"method": "percentile", "n_resamples": 20_000, "rng": np.random.default_rng(5)}
    expected = stats.bootstrap((np.array(DIFFERENCES),), np.mean, **method).confidence_interval
    assert Pairs(DIFFERENCES).interval() == pytest.approx((expected.low, expected.high), abs=0.02)
    assert Pairs(DIFFERENCES).interval() == Pairs(DIFFERENCES).interval()
    low, high = Pairs(DIFFERENCES).interval(0.5)
    assert low > Pairs(DIFFERENCES).interval()[0]
    assert high < Pairs(DIFFERENCES).interval()[1]


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30])
@pytest.mark.parametrize("probability", [0.5, 0.8, 0.975])
def test_students_quantiles_are_scipys(freedom: int, probability: float) -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is an extra")
    assert student(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=2e-3, abs=1e-4)


def test_what_could_have_been_seen_is_seen() -> None:
    """Ten pairs of deviation 1: of many samples shifted by the detectable difference about 80 % are significant."""
    stats = pytest.importorskip("scipy.stats", reason="SciPy is an extra")
    draw = np.random.default_rng(2)
    base = draw.normal(size=10)
    base = (base - base.mean()) / base.std(ddof=1)
    shift = Pairs(tuple(base)).detectable() or 0.0
    assert shift == pytest.approx((2.2622 + 0.8834) / 10**0.5, rel=1e-3)
    seen = stats.ttest_1samp(draw.normal(shift, 1, (4000, 10)), 0, axis=1).pvalue < 0.05
    assert seen.mean() == pytest.approx(0.8, abs=0.03)
    assert Pairs((1.0,)).detectable() is None


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


def test_verdicts() -> None:
    assert [verdict(*about) for about in ((1.0, 0.04), (-1.0, 0.04), (1.0, 0.06), (-1.0, 0.05))] == [
        "confirmed",
        "refuted",
        "not confirmed",
        "not confirmed",
    ]

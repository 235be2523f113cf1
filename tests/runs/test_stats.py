"""Statistics over seeds against numbers found by hand and against other functions of SciPy."""

import pytest
from scipy import stats

from fedlesam.runs.stats import PairedDifferences, paired, seed_mean

DIFFERENCES = (0.3, -0.1, 0.4, 0.2, 0.5, 0.1, -0.2, 0.6)


def test_over_seeds() -> None:
    two = seed_mean([1.0, 3.0])
    assert two is not None and (two.mean, two.spread) == (2.0, pytest.approx(2**0.5))
    one = seed_mean([1.0])
    assert one is not None and (one.mean, one.spread) == (1.0, None)
    assert seed_mean([]) is None


def test_paired_by_seed() -> None:
    assert paired({0: 3.0, 1: 5.0, 2: 9.0}, {2: 4.0, 1: 4.5, 7: 0.0}).values == (0.5, 5.0)


def test_the_interval_is_students() -> None:
    differences = PairedDifferences(DIFFERENCES)
    for level in (0.5, 0.95):
        expected = stats.ttest_1samp(DIFFERENCES, 0).confidence_interval(level)
        assert differences.interval(level) == pytest.approx((expected.low, expected.high))
    assert PairedDifferences((1.0, 2.0)).interval() == pytest.approx((1.5 - 12.7062 / 2, 1.5 + 12.7062 / 2), abs=1e-4)
    assert PairedDifferences((0.5, 0.5, 0.5)).interval() == (0.5, 0.5)

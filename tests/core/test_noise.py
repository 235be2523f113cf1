import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import normals
from scipy import stats

from fedlesam.core.noise import BLOCK, normal_vectors, standard_normal

SEEDS = st.integers(0, 2**63 - 1)


@given(SEEDS, st.integers(1, 40))
def test_they_are_those_of_unbounded_integers(seed: int, size: int) -> None:
    found = standard_normal(torch.tensor([seed]), size, torch.float64)
    torch.testing.assert_close(found[0], normals(seed, size), rtol=1e-13, atol=1e-13)


@given(SEEDS)
def test_single_precision_has_the_same_numbers(seed: int) -> None:
    one, other = (standard_normal(torch.tensor([seed]), 64, dtype) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_they_are_normal() -> None:
    found = standard_normal(torch.arange(200), 1000, torch.float64).numpy()
    assert stats.kstest(found.reshape(-1), "norm").pvalue > 0.01
    assert stats.kstest((found**2).sum(1), stats.chi2(1000).cdf).pvalue > 0.01
    assert np.abs(found).max() > 4


@pytest.mark.parametrize("what", ["seeds", "places", "halves"])
def test_neighbours_have_nothing_to_do_with_each_other(what: str) -> None:
    """Seeds follow each other from step to step; the two numbers of 64 bits are in the two halves."""
    found = standard_normal(torch.arange(2**40, 2**40 + 301), 1000, torch.float64).numpy()
    pairs = {
        "seeds": (found[1:], found[:-1]),
        "places": (found[:, 1:], found[:, :-1]),
        "halves": (found[:, :500], found[:, 500:]),
    }
    for one, other in (pairs[what], tuple(np.abs(side) - math.sqrt(2 / math.pi) for side in pairs[what])):
        products = (one * other).reshape(-1)
        assert abs(products.mean()) < 4 * products.std() / math.sqrt(products.size)


@pytest.mark.parametrize("size", [3, BLOCK // 4, BLOCK + 1])
def test_vectors_are_the_same_however_many_are_made_at_once(size: int) -> None:
    like = torch.empty(size)
    whole = list(normal_vectors(11, 6, like))
    assert len(whole) == 6
    for number, vector in enumerate(whole):
        assert torch.equal(vector, next(normal_vectors(11 + number, 1, like)))


def test_the_largest_seeds_may_wrap() -> None:
    last = list(normal_vectors(2**63 - 2, 4, torch.empty(5)))
    assert all(vector.isfinite().all() for vector in last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_same_numbers_rounded(dtype: torch.dtype) -> None:
    found, exact = (standard_normal(torch.tensor([5]), 1000, kind) for kind in (dtype, torch.float32))
    assert torch.equal(found, exact.to(dtype))

"""Clipping and ascent on plain vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.core.vectors import ascent_, clip_coefficient, rows_of


@given(st.integers(1, 4), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_the_clip_factor_is_that_of_torch(pieces: int, scale: float, max_norm: float) -> None:
    draw = torch.Generator().manual_seed(pieces)
    gradients = [scale * torch.randn(3, k + 1, generator=draw, dtype=torch.float64) for k in range(pieces)]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    factor = clip_coefficient(torch.cat([g.reshape(-1) for g in gradients]), max_norm)
    assert factor <= 1
    for p, g in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(p.grad, g * factor, atol=1e-12, rtol=1e-12)


def test_no_clip() -> None:
    assert clip_coefficient(torch.zeros(3), 1.0) == 1.0
    assert clip_coefficient(torch.full((3,), 0.1), 1.0) == 1.0, "exactly, so that multiplying by it changes no bit"


def test_ascent_is_in_place_and_of_norm_rho() -> None:
    g = torch.tensor([3.0, -4.0], dtype=torch.float64)
    e = ascent_(g, 2.0)
    assert e is g
    assert e.tolist() == pytest.approx([2 * 3 / (5 + 1e-7), -2 * 4 / (5 + 1e-7)], abs=1e-15)
    assert ascent_(torch.zeros(2), 2.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [1, 2], [2, 3], [2, 1], [0, 2], [1, 1], [3]])
def test_rows_of_one_matrix_are_not_copied(places: list[int]) -> None:
    whole = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    found = rows_of([whole[i] for i in places])
    assert torch.equal(found, whole[places])
    copied = found.data_ptr() != whole[places[0]].data_ptr()
    assert copied == (places != list(range(places[0], places[0] + len(places))))


def test_rows_that_are_no_neighbours() -> None:
    one, two = torch.eye(2, 3), torch.ones(2, 3)
    assert torch.equal(rows_of([one[1], two[0]]), torch.stack([one[1], two[0]]))
    pieces = one.view(-1)[1:4], one.view(-1)[2:5]
    assert torch.equal(rows_of(pieces), torch.stack(pieces)), "of the same length as a row, but across two"
    whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    across = whole.view(-1)[1:5], whole.view(-1)[5:9]
    assert torch.equal(rows_of(across), torch.stack(across))
    halves = one[:, :2]
    assert torch.equal(rows_of([halves[0], halves[1]]), halves), "a part of each row of the matrix behind it"

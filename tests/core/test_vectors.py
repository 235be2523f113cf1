"""Clipping and ascent on plain vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.core.vectors import ascent_, clip_coefficient


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

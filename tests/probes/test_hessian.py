"""Eigenvalues and trace against the explicit Hessian of a small model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from worlds import federation, mlp, play, samples

from fedlesam.probes import GlobalLoss, eigenvalues, trace
from fedlesam.probes.base import Look
from fedlesam.probes.hessian import Hessian
from reproduction.theory import Point, half_square


def explicit(weights: Tensor) -> Tensor:
    module, clients = mlp(), samples()
    shapes = {name: p.shape for name, p in module.named_parameters()}

    def whole(w: Tensor) -> Tensor:
        pieces = torch.split(w, [shape.numel() for shape in shapes.values()])
        named = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        losses = [F.cross_entropy(functional_call(module, named, (x,)), y) for x, y in clients]
        return torch.stack(losses).mean()

    found: Tensor = torch.autograd.functional.hessian(whole, weights)  # type: ignore[no-untyped-call]
    return found


def test_against_the_explicit_hessian() -> None:
    loss = GlobalLoss(mlp(), samples())
    w = loss.model.weights.clone()
    matrix = explicit(w)
    exact = torch.linalg.eigvalsh(matrix).flip(0)
    assert exact[-1] < 0, "indefinite: the largest by size and by sign are not the same question"
    for k in (1, 4, 10):
        assert eigenvalues(loss, w, k) == pytest.approx(exact[:k].tolist(), rel=2e-3)
    found, error = trace(loss, w, draws=400)
    assert abs(found - float(matrix.trace())) < 4 * error
    off_diagonal = matrix - matrix.diag().diag()
    assert error == pytest.approx(float((2 * off_diagonal.square().sum() / 400).sqrt()), rel=0.2)


def test_a_diagonal_hessian_has_an_exact_trace() -> None:
    curvature = torch.tensor([0.5, 1.0, 7.0, 2.0])
    x = torch.cat([torch.zeros(4), curvature])[None].double()
    loss = GlobalLoss(Point(torch.zeros(4, dtype=torch.float64)), [(x, torch.zeros(1))], half_square)
    assert trace(loss, torch.zeros(4, dtype=torch.float64), draws=3) == pytest.approx((10.5, 0.0))
    assert eigenvalues(loss, torch.zeros(4, dtype=torch.float64), 2) == pytest.approx([7.0, 2.0])


def test_the_probe_is_repeatable_and_in_order() -> None:
    fed = play(federation("fedlesam", model=mlp(dtype=torch.float32), clients=samples(dtype=torch.float32)))
    first, second = (Hessian(k=4, samples=0).reading(Look(fed)) for _ in range(2))
    assert first == second
    values = first[0]
    largest = [values[f"eigenvalue_{i}"] for i in range(1, 5)]
    assert largest == sorted(largest, reverse=True)
    exact = torch.linalg.eigvalsh(explicit(fed.weights.double())).flip(0)
    assert largest == pytest.approx(exact[:4].tolist(), rel=5e-3)
    assert first[1] == {"k": 4, "draws": 20, "samples": 52}


def test_bad_settings() -> None:
    loss = GlobalLoss(mlp(), samples())
    with pytest.raises(ValueError, match="k must be below the model's 39 parameters, got 39"):
        eigenvalues(loss, loss.model.weights, 39)
    with pytest.raises(ValueError, match="k must be below the model's 39 parameters"):
        Hessian(k=99).check(federation("fedavg"))
    with pytest.raises(ValueError, match="draws must be a whole number from 2, got 1"):
        Hessian(draws=1)

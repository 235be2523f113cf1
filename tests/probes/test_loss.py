"""The global loss of the probes against the definition, written out."""

import copy
import random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from worlds import SIZES, federation, mlp, play, samples

from fedlesam.probes import GlobalLoss
from fedlesam.probes import loss as loss_room


def plainly(module: nn.Module, clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """F by its definition: the mean over clients of their mean loss."""
    return torch.stack([F.cross_entropy(module(x), y) for x, y in clients]).mean()


@pytest.mark.parametrize("batch", [1, 4, 500])
def test_value_gradient_and_product(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_room, "BATCH", batch)
    clients, module = samples((*SIZES, 12, 12, 7)), mlp()
    value = plainly(module, clients)
    expected = value.item()
    parameters = list(module.parameters())
    first = torch.autograd.grad(value, parameters, create_graph=True)
    flat = torch.cat([g.flatten() for g in first])
    direction = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0), dtype=flat.dtype)
    second = torch.autograd.grad(flat @ direction, parameters)
    loss = GlobalLoss(module, clients)
    w = torch.cat([p.detach().flatten() for p in parameters])
    found, gradient = loss.gradient(w)
    assert found == pytest.approx(expected, rel=1e-12)
    assert loss.value(w) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, flat.detach())
    torch.testing.assert_close(loss.product(w, direction), torch.cat([h.flatten() for h in second]))
    accuracy = fmean(float((module(x).argmax(1) == y).double().mean()) for x, y in clients)
    assert loss.score(w)[1] == pytest.approx(accuracy)
    assert loss.samples == sum(len(x) for x, _ in clients)


def test_one_client_alone() -> None:
    clients, module = samples(), mlp()
    loss, w = GlobalLoss(module, clients), torch.cat([p.detach().flatten() for p in module.parameters()])
    alone = [loss.only(i).value(w) for i in range(len(clients))]
    for found, (x, y) in zip(alone, clients, strict=True):
        assert found == pytest.approx(F.cross_entropy(module(x), y).item())
    assert loss.value(w) == pytest.approx(fmean(alone)), "not weighted by their sizes"


def test_a_subsample_is_fixed_equal_over_clients_and_of_a_known_size() -> None:
    clients, module = samples((20, 30, 2, 40)), mlp()
    w = torch.cat([p.detach().flatten() for p in module.parameters()])
    loss = GlobalLoss(module, clients, samples=21, seed=3)
    assert loss.sizes == {0: 5, 1: 5, 2: 2, 3: 5}
    assert loss.samples == 17
    assert loss.value(w) == GlobalLoss(module, clients, samples=21, seed=3).value(w)
    assert loss.value(w) != GlobalLoss(module, clients, samples=21, seed=4).value(w)
    assert GlobalLoss(module, clients, samples=1).samples == 4, "at least one of each client"
    assert GlobalLoss(module, clients, samples=1000).value(w) == pytest.approx(GlobalLoss(module, clients).value(w))
    with pytest.raises(ValueError, match="samples must be a whole number from 1, got 0"):
        GlobalLoss(module, clients, samples=0)


class Noisy(Dataset[Any]):
    """Draws from every global generator while it makes a sample."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        extra = random.random() + np.random.rand()  # noqa: NPY002
        return torch.randn(5, dtype=torch.float64) + i + extra, i % 3


def test_it_draws_no_random_numbers_and_changes_no_model() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    clients: list[Any] = [Noisy(), Noisy()]
    before = copy.deepcopy(module.state_dict())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index, union-attr]  # noqa: NPY002
    loss = GlobalLoss(module, clients)
    w = loss.model.weights.clone()
    first, second = loss.gradient(w), loss.gradient(w)
    assert first[0] == second[0], "the same samples, no dropout"
    assert loss.value(w) == first[0]
    assert loss.product(w, w).isfinite().all()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]  # type: ignore[index, union-attr]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, value in loss.model.module.state_dict().items():
        assert "running" not in name or torch.equal(value, before[name]), "statistics are read, not updated"


def test_of_a_federation_it_is_the_loss_it_trains() -> None:
    fed = play(federation("fedlesam"))
    loss = GlobalLoss.of(fed)
    assert loss.value(fed.weights) == pytest.approx(plainly(fed.model, list(fed.clients)).item())  # type: ignore[arg-type]

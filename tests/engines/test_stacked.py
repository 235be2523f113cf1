"""The stacked engine against the plain one: the same numbers to rounding, for every method."""

from typing import Any

import pytest
import torch
from torch import nn

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE
from fedlesam.federation import Federation


def clients(dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of three sizes, so that there are stacks and a client alone."""
    draw = torch.Generator().manual_seed(3)
    sizes = (12, 12, 12, 9, 9, 5)
    return [(torch.randn(n, 6, generator=draw, dtype=dtype), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    net[0].bias.requires_grad_(False)
    return net


def pair(method: str, **local: Any) -> tuple[Federation, Federation]:
    settings = fl.LocalTraining(lr=0.2, epochs=range(1, 3), batch_size=5, **local)
    made = [Federation(model(), clients(), method, settings, active=5, engine=e) for e in ("plain", "stacked")]
    return made[0], made[1]


@pytest.mark.parametrize(
    "local",
    [
        {},
        {"clip": 0.3},
        {"clip": 0.3, "clip_scope": "corrected"},
        {"momentum": 0.5},
        {"clip": None, "weight_decay": 0.0},
    ],
    ids=["plain", "clipped", "corrected", "momentum", "bare"],
)
@pytest.mark.parametrize("method", CATALOGUE)
def test_the_same_as_the_plain_engine(method: str, local: dict[str, Any]) -> None:
    plain, stacked = pair(method, **local)
    for _ in range(5):
        one, other = plain.round(), stacked.round()
        assert one.active == other.active
        assert (one.backward_passes, one.bytes_down, one.bytes_up) == (
            other.backward_passes,
            other.bytes_down,
            other.bytes_up,
        )
        assert other.train_loss == pytest.approx(one.train_loss, abs=1e-11)
        assert other.divergence == pytest.approx(one.divergence, rel=1e-6, abs=1e-10)
    torch.testing.assert_close(stacked.weights, plain.weights, rtol=0, atol=1e-11)
    assert set(stacked.memories) == set(plain.memories)
    for client in plain.memories:
        for slot in ("perturbation", "correction"):
            mine, theirs = getattr(plain.memories[client], slot), getattr(stacked.memories[client], slot)
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-10)


def test_clients_were_really_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlesam.engines.stacked import StackedEngine

    stacks: list[list[int]] = []
    together = StackedEngine.together
    monkeypatch.setattr(StackedEngine, "together", lambda self, *a: stacks.append(a[1]) or together(self, *a))
    settings = fl.LocalTraining(epochs=1, batch_size=5)
    Federation(model(), clients(), "fedavg", settings, engine="stacked").round()
    assert stacks == [[0, 1, 2], [3, 4]]


def test_two_workers_stack_too() -> None:
    settings = fl.LocalTraining(epochs=2, batch_size=5)
    with Federation(model(), clients(), "fedlesam-s", settings, engine="stacked", workers=2) as two:
        one = Federation(model(), clients(), "fedlesam-s", settings, threads=1)
        for _ in range(3):
            one.round()
            two.round()
        torch.testing.assert_close(two.weights, one.weights, rtol=0, atol=1e-11)


def test_random_layers_and_buffers_are_refused() -> None:
    settings = fl.LocalTraining(epochs=1, batch_size=5)
    drops = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).double()
    with pytest.raises(ValueError, match="stacked engine cannot train this model"):
        Federation(drops, clients(), "fedavg", settings, engine="stacked").round()
    norms = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match=r"buffers such as BatchNorm's; use the plain engine"):
        Federation(norms, clients(), "fedavg", settings, engine="stacked").round()


def test_a_client_that_diverges_is_named() -> None:
    broken = clients()
    broken[1][0][3] = torch.inf
    settings = fl.LocalTraining(epochs=1, batch_size=20)
    federation = Federation(model(), broken, "fedavg", settings, engine="stacked")
    before = federation.weights
    with pytest.raises(fl.NotFinite, match="round 0, client 1"):
        federation.round()
    assert torch.equal(federation.weights, before)
    assert federation.round(active=[0, 2, 3]).round == 0

"""Buffers of every kind through Flower's messages: the same as in the simulation, to the bit."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from local_grid import LocalGrid
from scenes import CLIENTS, QUICK, SEED, TIMEOUT, app, simulation

from fedlesam.core.buffers import same_bits
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Broadcast
from fedlesam.flower import Strategy, records

pytestmark = pytest.mark.extras


class Net(nn.Module):
    def __init__(self, explode: bool = False, turn: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.explode, self.turns = nn.Linear(5, 3), explode, turn
        self.mean: Tensor
        self.mask: Tensor
        self.turn: Tensor
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.tensor([-math.inf, math.nan, 1.0]))
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.arange(2.0)))
        self.register_buffer("small", torch.tensor([1, -1], dtype=torch.int8))
        self.register_buffer("wide", torch.arange(3.0).expand(2, 3))
        self.register_buffer("brief", torch.ones(2, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if self.training:
            self.mean += 0.1 * output.detach().mean(0)
            if self.explode:
                self.mask[2] = math.inf
            if self.turns:
                self.turn *= 1j
        return output * (1 + self.mean)


def strategy(model: nn.Module, folder: Path | None = None) -> Strategy:
    return Strategy(model, "fedlesam", clients=CLIENTS, seed=SEED, folder=folder, **QUICK)


def test_the_same_as_in_the_simulation(tmp_path: Path) -> None:
    first = Net()
    grid = LocalGrid(app(make=lambda context: copy.deepcopy(first)), CLIENTS)
    strategy(first, tmp_path).start(grid, num_rounds=1, timeout=TIMEOUT)
    resumed = strategy(first, tmp_path)
    result = resumed.start(grid, num_rounds=2, timeout=TIMEOUT)
    fed = simulation("fedlesam", model=first)
    ledger = list(fed.run(2))
    assert torch.equal(resumed.state.weights, fed.state.weights)
    assert resumed.state.buffers.keys() == fed.state.buffers.keys() == {"mean", "mask", "small", "wide", "brief"}
    for name, value in resumed.state.buffers.items():
        assert same_bits(value, fed.state.buffers[name]), name
    assert resumed.state.buffers["mean"].abs().sum() > 0
    assert same_bits(result.arrays.to_torch_state_dict()["turn"], first.turn)
    assert [r.bytes_up for r in resumed.rounds] == [r.bytes_up for r in ledger]


@pytest.mark.parametrize(
    ("change", "says"),
    [({"explode": True}, "the buffer mask is not finite"), ({"turn": True}, "the buffer turn changes")],
)
def test_what_is_wrong_is_left_out_and_said(
    change: dict[str, bool], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    grid = LocalGrid(app(make=lambda context: Net(**change)), CLIENTS)
    server = strategy(Net())
    with pytest.raises(RuntimeError, match="fewer than"):
        server.start(grid, num_rounds=1, timeout=TIMEOUT)
    said = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert said
    assert all(says in reason for reason in said)


def test_another_models_buffers_are_refused() -> None:
    flat = FlatModel(Net())
    sent = Broadcast(0, flat.weights, {**flat.buffers(), "mean": torch.zeros(4)}, {}, {})
    order = records.Order(sent, "a" * 32, "", 7, "X")
    content = records.order_content(order, records.arrays(sent.flatten()), {})
    with pytest.raises(ValueError, match=r"other buffers \(mean\): both apps"):
        records.read_order(content, flat)


def test_models_that_flower_cannot_carry_are_refused() -> None:
    model = nn.Linear(5, 3)
    model.register_buffer("brief", torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"brief of the model cannot be put into Flower's arrays.*BFloat16"):
        strategy(model)
    with pytest.raises(ValueError, match="no shape yet"):
        strategy(nn.LazyLinear(3))
    model = nn.Linear(5, 3)
    model.register_buffer("mean", torch.zeros(2), persistent=False)
    with pytest.raises(ValueError, match=r"no buffers"):
        Strategy(model, "fedavg", clients=CLIENTS, answer="model")

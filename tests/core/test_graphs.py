"""Recorded passes give the bits of passes that run. Without a GPU a tape of operations stands for its graphs."""

import copy
import logging
import random
from typing import Any

import pytest
import torch
from replayed import TapeRecorder
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from worlds import assert_same_bits, federation, play, samples, states, steps_in, training

from fedlesam.algorithms import CATALOGUE
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.graphs import MOST, REHEARSALS, Graphs, Watched
from fedlesam.federation import Federation

SCHEDULE = [[0, 1], [0, 4], [1, 4]]


def drawing(method: str = "") -> nn.Module:
    """With dropout and BatchNorm; privacy refuses statistics, which would be sent without noise."""
    torch.manual_seed(3)
    norm = nn.GroupNorm(2, 6) if method.startswith("dp-") else nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(5, 6), norm, nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 3)).double()


def graphed(fed: Federation) -> TapeRecorder:
    """Records the passes of a federation on the CPU."""
    fed._flat.graphs = graphs = Graphs(fed._flat.device, fed._flat.state, TapeRecorder)
    graphs.recorder = recorder = TapeRecorder(fed._flat.device)
    return recorder


@pytest.mark.parametrize("method", CATALOGUE)
def test_replays_have_the_bits_of_passes(method: str) -> None:
    """Over clients and rounds; both passes of a step see the same mask, and the first leaves the buffers alone."""
    local = training(epochs=2, momentum=0.5)
    one, other = (federation(method, model=drawing(method), local=local) for _ in range(2))
    recorder = graphed(other)
    records = [[fed.round(active) for active in SCHEDULE] for fed in (one, other)]
    assert_same_bits(states(one), states(other))
    assert [r.backward_passes for r in records[0]] == [r.backward_passes for r in records[1]]
    assert [r.train_loss for r in records[0]] == [r.train_loss for r in records[1]]
    recorded = one.algorithm.perturbation.teaches != "descent"  # a teacher has other tensors in every round
    assert (recorder.replays > recorder.records >= 1) is recorded


def test_a_form_is_recorded_once_for_all_clients_and_rounds() -> None:
    fed = federation("fedsam", clients=samples((8, 12, 8)), local=training(epochs=3))
    recorder = graphed(fed)
    passes = sum(fed.round([0, 1, 2]).backward_passes for _ in range(3))
    assert (recorder.records, recorder.replays) == (1, passes - REHEARSALS)


def test_only_so_many_forms_are_recorded() -> None:
    fed = federation("fedavg", clients=samples(range(2, MOST + 6)), local=training(epochs=5, batch_size=50))
    recorder = graphed(fed)
    play(fed, [range(MOST + 4)] * 2)
    assert recorder.records == MOST


class Reads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.how, self.calls = nn.Linear(5, 3, dtype=torch.float64), how, 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "reads":
            x = x / max(1.0, float(x.norm()))
        if self.how == "chooses":
            x = x[x.sum(1) > -100]
        if self.how == "replaces":
            self.seen = self.seen + 1
        if self.how == "varies" and self.calls % 2:
            x = x * 1.0
        output: Tensor = self.inner(x)
        return output


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("reads", "aten._local_scalar_dense.default is read on the host"),
        ("chooses", "aten.index.Tensor is read on the host"),
        ("replaces", "the model replaces its buffers"),
        ("varies", "the model does other operations in other steps"),
    ],
)
def test_what_a_graph_could_not_repeat_runs_without(how: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    clients = samples((8, 12, 4, 4, 12))
    one, other = (federation("fedavg", model=Reads(how), clients=clients) for _ in range(2))
    recorder = graphed(other)
    with caplog.at_level(logging.WARNING):
        for fed in (one, other):
            play(fed, SCHEDULE)
    assert_same_bits(states(one), states(other))
    assert recorder.records == 0
    assert [r.message for r in caplog.records] == [f"no CUDA graphs: {why}; training continues without them"]


def test_choosing_by_number_is_no_read() -> None:
    with Watched(torch.device("cpu")) as seen:
        torch.ones(3)[torch.tensor([0, 2])].sum()
    assert seen.why is None


def test_a_tensor_elsewhere_is_seen() -> None:
    weights = torch.zeros(3, device="meta")
    with Watched(weights.device) as seen:
        weights.add_(torch.ones(3).to("meta"))
    assert seen.why is not None
    assert "not on meta" in seen.why


def test_a_client_that_is_not_finite_is_found_with_its_step() -> None:
    fed = federation("fedavg", local=training(epochs=4, batch_size=50), on_client_error="drop")
    graphed(fed)
    fed.round([0, 1])
    x, y = fed.clients[0]
    fed.clients[0] = (x * torch.nan, y)  # type: ignore[index]
    record = fed.round([0, 1])
    assert record.dropped is not None
    assert record.dropped[0].startswith("the loss of step 0 is not finite")


def test_graphs_are_for_gpus() -> None:
    assert federation("fedavg")._flat.graphs is None


def test_gradients_and_weights_never_move() -> None:
    """What a graph relies on, from step to step and from client to client."""
    fed = play(federation("fedsam", model=drawing()), [[0, 1]])
    flat = FlatModel(copy.deepcopy(fed.model))
    places = set()
    for client in (0, 1, 4):
        steps = steps_in(fed, client, flat)
        for step in (next(steps), next(steps)):
            r = step.round
            moved = [t.data_ptr() for p in flat.parameters for t in (p, p.grad) if t is not None]
            places.add((r.u.data_ptr(), r.v.data_ptr(), r.g.data_ptr(), *moved))
        steps.close()
    assert len(places) == 1


@pytest.mark.parametrize("model", [None, drawing], ids=["mlp", "batch norm and dropout"])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam-s"])
def test_a_pass_traced_twice_is_the_same_graph(method: str, model: Any) -> None:
    fed = play(federation(method, model=model and model(method)), [[0, 1]])
    flat, task = fed._flat, fed.task
    x, y = samples((6,))[0]

    def work(x: Tensor, y: Tensor) -> Tensor:
        return flat.backward(task, (x, y), flat.scratch("g"))

    flat.module.train()
    flat.weights.copy_(fed.state.weights)
    once, again = (make_fx(work)(x, y).code for _ in range(2))
    assert once == again
    assert "_local_scalar_dense" not in once


def test_draws_on_the_host_are_seen() -> None:
    from fedlesam.core.graphs import _host_draws

    for draw in (random.random, lambda: torch.rand(1)):
        before = _host_draws()
        draw()
        assert _host_draws() != before


@pytest.mark.gpu
@pytest.mark.parametrize("model", [None, drawing], ids=["mlp", "batch norm and dropout"])
@pytest.mark.parametrize("method", CATALOGUE)
def test_on_a_gpu(method: str, model: Any) -> None:
    local = training(epochs=4, momentum=0.5)
    feds = [
        federation(method, model=model and model(method), local=local, device="cuda", cuda_graphs=graphs)
        for graphs in (False, True)
    ]
    for fed in feds:
        play(fed, SCHEDULE)
    one, other = feds
    assert other._flat.graphs is not None
    assert bool(other._flat.graphs.recorded) is (one.algorithm.perturbation.teaches != "descent")
    assert one._flat.graphs is None
    assert_same_bits(states(one), states(other))

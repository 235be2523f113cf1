"""Recorded steps give the bits of steps that run. Without a GPU a tape of operations stands for its graphs."""

import copy
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from replayed import TapeRecorder
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from worlds import assert_same_bits, federation, play, samples, states, steps_in, training

from fedlesam.algorithms import CATALOGUE
from fedlesam.core.client import local_update
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.graphs import MOST, REHEARSALS, Graphs, Watched
from fedlesam.core.slots import Algorithm, State, Step
from fedlesam.core.vectors import ascent_
from fedlesam.federation import Federation
from fedlesam.rules.perturbation import LocalAscent, RampedAscent

SCHEDULE = [[0, 1], [0, 4], [1, 4]]


def drawing(method: str = "") -> nn.Module:
    """With dropout and BatchNorm; privacy refuses statistics, which would be sent without noise."""
    torch.manual_seed(3)
    norm = nn.GroupNorm(2, 6) if method.startswith("dp-") else nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(5, 6), norm, nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 3)).double()


def graphed(fed: Federation) -> TapeRecorder:
    """Records the steps of a federation on the CPU."""
    fed._flat.graphs = graphs = Graphs(fed._flat.device, fed._flat.state, TapeRecorder)
    graphs.recorder = recorder = TapeRecorder(fed._flat.device)
    return recorder


def same_with_graphs(method: Any, schedule: Sequence[Sequence[int]] = SCHEDULE, **given: Any) -> TapeRecorder:
    """Trains with and without; all that is known afterwards has the same bits."""
    one, other = (federation(method, **given) for _ in range(2))
    recorder = graphed(other)
    records = [[fed.round(active) for active in schedule] for fed in (one, other)]
    assert_same_bits(states(one), states(other))
    assert [r.backward_passes for r in records[0]] == [r.backward_passes for r in records[1]]
    assert [r.train_loss for r in records[0]] == [r.train_loss for r in records[1]]
    return recorder


@pytest.mark.parametrize("method", CATALOGUE)
def test_replays_have_the_bits_of_steps(method: str) -> None:
    """Over clients and rounds; both passes of a step see the same mask, and the first leaves the buffers alone."""
    recorder = same_with_graphs(method, model=drawing(method), local=training(epochs=2, momentum=0.5))
    recorded = federation(method).algorithm.perturbation.teaches != "descent"  # its teacher's pass is seeded anew
    assert (recorder.replays > recorder.records >= 1) is recorded


SETTINGS = {
    "neither momentum nor clipping": {"momentum": 0.0, "clip": None},
    "clipped with its correction": {"clip_scope": "corrected", "clip": 0.1},
    "no weight decay": {"weight_decay": 0.0},
    "other numbers of steps": {"epochs": 1.7, "weight_decay": 0.1},
}


@pytest.mark.parametrize("method", ["fedavg", "fedcm", "feddyn", "fedwmsam", "fedlesam-s"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_whole_step_is_recorded_with_all_its_settings(method: str, settings: dict[str, Any]) -> None:
    assert same_with_graphs(method, local=training(**{"epochs": 2, **settings})).replays > 0


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedsam"])
def test_adamw_is_recorded(method: str) -> None:
    assert same_with_graphs(method, local=training(epochs=2, optimizer="adamw", lr=0.01)).replays > 0


def test_a_learning_rate_that_falls_step_by_step_is_recorded() -> None:
    fallen = Algorithm(LocalAscent(0.1), lr_floor=0.1)
    assert same_with_graphs(fallen, local=training(epochs=3)).replays > 0


def test_a_rule_that_follows_the_rounds_is_recorded_anew() -> None:
    """Its numbers are fixed in a graph."""
    recorder = same_with_graphs(Algorithm(RampedAscent(0.5, warmup=2)), [[0, 1]] * 4, local=training(epochs=4))
    assert recorder.records > 2
    assert recorder.replays > 0


@pytest.mark.parametrize(("method", "parts"), [("fedavg", 1), ("fedlesam-s", 1), ("fedsam", 2), ("fedspeed", 2)])
def test_a_step_is_one_replay_or_two(method: str, parts: int) -> None:
    """Recorded once for all clients and rounds, but for first rounds of a client, which may have fewer vectors."""
    fed = federation(method, clients=samples((8, 12, 8)), local=training(epochs=3))
    recorder = graphed(fed)
    passes = sum(fed.round([0, 1, 2]).backward_passes for _ in range(3))
    forms = recorder.records
    assert forms == parts * (2 if method == "fedlesam-s" else 1)
    assert recorder.replays == passes - forms * REHEARSALS


def test_nothing_but_the_batch_the_number_and_the_loss_is_outside() -> None:
    """Operations that Python starts in a step: two tensors are gathered, each is copied; the loss; the number."""
    fed = federation("fedsam", clients=samples((40, 40)), local=training(epochs=1, batch_size=4))
    recorder = graphed(fed)
    play(fed, [[0, 1]])
    recorder.silent = True
    steps = steps_in(fed, 0, fed._flat)
    next(steps)
    with Watched(torch.device("cpu")) as seen:
        for _ in range(5):
            next(steps)
    steps.close()
    counts = Counter(str(operation[0]).split(".")[1] for operation in seen.operations)
    per_step = {"slice": 1, "index": 2, "copy_": 2, "fill_": 1, "clone": 1}
    assert counts == {name: 5 * number for name, number in per_step.items()}


@dataclass(frozen=True)
class Replaces(LocalAscent):
    """Puts another tensor into its state at every step."""

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"last": torch.zeros_like(anchor)}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        e = ascent_(gradient, self.rho).add_(step.client_state["last"], alpha=0.5)
        step.client_state["last"] = e.clone()
        return e


@dataclass(frozen=True)
class ReadsOnHost(LocalAscent):
    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return gradient.mul_(min(1.0, self.rho / float(gradient.norm())))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (Replaces(0.1), "the rule replaces the tensors of its state"),
        (ReadsOnHost(0.1), "aten._local_scalar_dense.default is read on the host"),
    ],
    ids=["replaces", "reads"],
)
def test_a_rule_that_a_graph_could_not_repeat_runs_without(
    rule: LocalAscent, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert same_with_graphs(Algorithm(rule)).records == 0
    assert [r.message for r in caplog.records] == [f"no CUDA graphs: {why}; training continues without them"]


def test_a_number_that_changes_is_seen() -> None:
    seen = []
    for number in (0.5, 0.25):
        with Watched(torch.device("cpu")) as watched:
            torch.ones(3).mul_(number)
        seen.append(watched.operations)
    assert seen[0] != seen[1]


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


@pytest.mark.parametrize("how", [{}, {"cuda_graphs": True}, {"engine": "stacked"}, {"stack_runs": 8}], ids=str)
def test_a_client_that_is_not_finite_is_found_with_its_step(how: dict[str, Any]) -> None:
    """Its outputs grow by 1e61 with every step and a float64 ends at 1e308: the losses of steps 3 to 5 are infinite."""
    model, zeros = nn.Linear(5, 1, bias=False).double(), torch.zeros(4, 5, dtype=torch.float64)
    nn.init.ones_(model.weight)
    local = training(lr=1e30, epochs=6, loss=nn.functional.mse_loss, clip=None, weight_decay=0.0)
    clients = [(zeros.clone(), zeros[:, :1]) for _ in range(3)]
    fed = federation("fedavg", model=model, clients=clients, local=local, on_client_error="drop", **how)
    recorder = graphed(fed) if "cuda_graphs" in how else TapeRecorder(torch.device("cpu"))
    assert fed.round([0, 1]).dropped is None
    clients[1][0].fill_(1e15)
    before = recorder.replays
    assert fed.round([0, 1, 2]).dropped == {1: "the loss of step 3 is not finite"}
    assert recorder.replays - before == (3 * 6 if "cuda_graphs" in how else 0), "its steps are replays"


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


def traced(method: str, client: int, rounds: int, model: nn.Module | None = None) -> list[GraphModule]:
    """What is recorded of a client's steps on the meta device, which cannot be read."""
    fed = play(federation(method, model=model), [[0, 1]] * rounds)
    flat, sent, found = FlatModel(fed.model.to("meta")), fed.state.sent(fed.algorithm), []

    class Tracer(TapeRecorder):
        def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            found.append(make_fx(work)())
            return lambda: None, work()

    flat.graphs = Graphs(flat.device, flat.state, Tracer)
    broadcast = type(sent).unflatten(sent.round, {k: v.to("meta") for k, v in sent.flatten().items()})
    rules, local, memory = fed.algorithm, training(epochs=3, batch_size=2), fed.memories[client]
    steps = local_update(flat, fed.clients[client], rules, local, broadcast, memory, client=client, seed=7)
    for _ in range(REHEARSALS + 3):
        next(steps)
    steps.close()
    return found


@pytest.mark.parametrize("method", CATALOGUE)
def test_a_step_traced_twice_is_the_same_graph_and_runs_on_fake_cuda(method: str) -> None:
    """In another round, by another client. Autograd of a PyTorch without CUDA refuses it, so it is traced on meta."""
    once, again = traced(method, 0, 1), traced(method, 1, 2)
    rule = federation(method).algorithm.perturbation
    assert len(once) == {"": rule.passes, "ascent": 1, "descent": 0}[rule.teaches]
    assert [graph.code for graph in once] == [graph.code for graph in again]
    for graph in once:
        assert "_local_scalar_dense" not in graph.code
        assert "addcmul_" in graph.code or graph is not once[-1], "the descent"
        run_on_fake_cuda(graph)


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam-s"])
def test_a_step_with_statistics_and_masks_traced_twice_is_the_same_graph(method: str) -> None:
    once, again = (traced(method, client, client + 1, drawing()) for client in (0, 1))
    assert [graph.code for graph in once] == [graph.code for graph in again]
    assert all("bernoulli_" in graph.code and "batch_norm" in graph.code for graph in once)


def run_on_fake_cuda(graph: GraphModule) -> None:
    """An operation with a tensor of another device raises."""
    with FakeTensorMode(), torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                real = getattr(graph, node.target)
                assert real.device.type != "cpu", "a tensor of the host would be fixed in a graph"
                delattr(graph, node.target)
                fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
                graph.register_buffer(node.target, fake)
            if "device" in node.kwargs:
                assert node.kwargs["device"].type == "meta"
                node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
        graph.recompile()
        assert graph().device.type == "cuda"


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

"""What decides the speed on a GPU, checked without one: a local step reads nothing on the host and is sent nothing."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from elsewhere import ReadsGiveZeros
from seven_tasks import Transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import federation, mlp, play, samples, steps_in, training

from fedlesam import algorithms
from fedlesam.algorithms import CATALOGUE
from fedlesam.core import step as local_step
from fedlesam.core.batches import Batches, ClientData
from fedlesam.core.checks import NotFinite
from fedlesam.core.client import drain, local_update
from fedlesam.core.client_tests import ClientTests, score_clients
from fedlesam.core.evaluation import BATCH, score_batches
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Memory
from fedlesam.core.reduction import Reduction
from fedlesam.core.task import Task, TaskName
from fedlesam.engines._feed import Member
from fedlesam.engines._mapped import MappedStep
from fedlesam.engines._numbers import numbers_of
from fedlesam.engines._rows import Run
from fedlesam.engines._stack import Entry, feed_of, train_stack

READS = "aten._local_scalar_dense.default"


class Counted(TorchDispatchMode):
    """Counts operations, and copies that leave the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        given = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim}
        made = {t.device.type for t in tree_leaves(out) if isinstance(t, Tensor)}
        self.sent += given == {"cpu"} and "meta" in made
        return out


@pytest.mark.parametrize("scope", ["loss", "corrected"])
@pytest.mark.parametrize("method", CATALOGUE)
def test_a_step_reads_nothing(method: str, scope: str) -> None:
    fed = play(federation(method, local=training(epochs=3, clip_scope=scope, momentum=0.5)), [[0, 1], [0, 2]])
    steps = steps_in(fed, 0)
    next(steps)
    with Counted() as mode:
        next(steps)
        next(steps)
    steps.close()
    assert mode.calls["aten.add_.Tensor"] > 0
    assert mode.calls[READS] == 0


def test_a_read_is_seen() -> None:
    with Counted() as mode:
        float(torch.ones(3).sum())
    assert mode.calls[READS] == 1


@pytest.mark.parametrize("method", CATALOGUE)
def test_the_steps_run_on_the_meta_device_and_are_sent_nothing(method: str) -> None:
    """There every read raises. It stands for a GPU: samples are there for the round, an epoch's order is one copy."""
    fed = play(federation(method), [[0, 1], [0, 2]])
    on_meta = FlatModel(fed.model.to("meta"))
    state = fed.state.sent(fed.algorithm)
    broadcast = type(state).unflatten(state.round, {k: v.to("meta") for k, v in state.flatten().items()})
    memory = fed.memories.get(0, Memory())  # on the CPU, as from a file or from Flower
    local = training(epochs=1, batch_size=2)
    steps = local_update(on_meta, fed.clients[0], fed.algorithm, local, broadcast, memory, client=0, seed=7)
    with Counted() as first:
        next(steps)
    with Counted() as mode:
        next(steps)
        next(steps)
    steps.close()
    vectors = sum(tensor.ndim > 0 for tensor in memory.flatten().values())
    assert first.sent == 3 + vectors, "x, y, the order of the epoch, and what the client remembers"
    assert mode.sent == 0


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("method", CATALOGUE)
def test_the_steps_of_a_stack_read_nothing_and_are_sent_nothing(method: str, apart: bool) -> None:
    """From the first step to the last, on the meta device, too; `apart` is a stack that runs share."""
    fed = play(federation(method, clients=samples((8, 8, 8, 6))), [[0, 1], [0, 2]])
    on_meta, task, local = FlatModel(fed.model.to("meta")), Task.classification(), training(epochs=1, batch_size=3)
    state, algorithm = fed.state.sent(fed.algorithm), fed.algorithm.at(fed.state.round)
    broadcast = type(state).unflatten(state.round, {k: v.to("meta") for k, v in state.flatten().items()})
    run = Run(algorithm, local, broadcast, numbers_of(algorithm, local))
    fills, entries = not algorithm.perturbation.teaches, list[Entry]()
    for client, steps in enumerate((3, 3, 3, 2) if fills else (3, 3, 3)):
        data = Batches(fed.clients[client], on_meta.device, task.collate)
        member = Member(client, data, data.size, steps, 7, state.round, (), mask=client, fills=fills)
        entries.append(Entry(member, run, fed.memories.get(client, Memory()).to(on_meta.device)))
    seen: list[tuple[int, int]] = []
    with ReadsGiveZeros() as mode:
        step, width = MappedStep(on_meta, task, compile=False), len(entries)
        feed = feed_of(local, [entry.member for entry in entries], width, apart)
        results = train_stack(step, entries, feed, width, apart, lambda: seen.append((mode.read, mode.sent)))
    assert len(results) == width
    assert seen == [(0, mode.sent)] * 3
    assert mode.read <= 3, "the losses, and the norms of what is sent"


DESCENTS: dict[str, tuple[dict[str, Any], float]] = {
    "sgd": ({}, 1.0),
    "momentum": ({"momentum": 0.9}, 0.1),
    "adamw": ({"optimizer": "adamw", "lr": 0.01}, 0.1),
    "corrected": ({"clip_scope": "corrected"}, 1.0),
}
"""Local training, and the share of the learning rate that the last step has."""


@pytest.mark.parametrize(
    ("method", "descent"),
    [(m, d) for m in CATALOGUE for d in ("sgd", "momentum")]
    + [(m, "adamw") for m in CATALOGUE if algorithms.example(m).correction.any_optimizer]
    + [(m, "corrected") for m in ("fedavg", "scaffold", "fedcm", "fedwmsam")],
)
def test_the_descent_has_no_graph_break(method: str, descent: str) -> None:
    local, floor = DESCENTS[descent]
    algorithm = dataclasses.replace(algorithms.example(method), lr_floor=floor)
    fed = play(federation(algorithm, local=training(**local)), [[0, 1]])
    steps = steps_in(fed, 0)
    step = next(steps)
    plain = step.round.v.clone()
    torch.compile(local_step.move, fullgraph=True, backend="eager")(step.round, 0)
    assert not torch.equal(plain, step.round.v)
    steps.close()
    torch._dynamo.reset()


def elsewhere(batches: int, *shape: int) -> Tensor:
    return torch.zeros(batches * BATCH, *shape, device="meta")


def classes_elsewhere(batches: int, *shape: int) -> Tensor:
    return elsewhere(batches, *shape).long()


READY: dict[str, tuple[Task, nn.Module, Callable[[int], Any]]] = {
    "classification": (Task.classification(), nn.Linear(3, 4), lambda n: (elsewhere(n, 3), classes_elsewhere(n))),
    "binary": (Task.binary(), nn.Linear(3, 1), lambda n: (elsewhere(n, 3), classes_elsewhere(n, 1))),
    "multilabel": (Task.multilabel(), nn.Linear(3, 4), lambda n: (elsewhere(n, 3), elsewhere(n, 4))),
    "regression": (Task.regression(), nn.Linear(3, 2), lambda n: (elsewhere(n, 3), elsewhere(n, 2))),
    "language_model": (
        Task.language_model(),
        nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 6)),
        lambda n: (classes_elsewhere(n, 5), classes_elsewhere(n, 5)),
    ),
    "segmentation": (
        Task.segmentation(),
        nn.Conv2d(2, 3, 1),
        lambda n: (elsewhere(n, 2, 4, 4), classes_elsewhere(n, 4, 4)),
    ),
    "huggingface": (
        Task.huggingface(),
        Transformer().float(),
        lambda n: {
            "input_ids": classes_elsewhere(n, 5),
            "attention_mask": elsewhere(n, 5),
            "labels": classes_elsewhere(n),
        },
    ),
}


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("name", get_args(TaskName))
def test_an_evaluation_reads_the_device_once(name: str, batches: int) -> None:
    """The losses and all metrics of all batches in one copy; nothing is sent where the samples are there."""
    task, module, data = READY[name]
    model = FlatModel(module.to("meta"))
    test = Batches(data(batches), model.device)
    with ReadsGiveZeros() as mode:
        scores = score_batches(model, test, task)
    assert (mode.read, mode.sent) == (1, 0)
    assert [set(score.sums) for score in scores] == [set(task.measured)] * batches


@pytest.mark.parametrize("batches", [1, 4])
def test_clients_own_samples_are_sent_and_read_once(batches: int) -> None:
    model = FlatModel(nn.Linear(3, 4).to("meta"))
    own: list[ClientData | None] = [(torch.zeros(BATCH // 2, 3), torch.zeros(BATCH // 2).long())] * 2 * batches
    with ReadsGiveZeros() as mode:
        scores = score_clients(model, ClientTests(own), Task.classification())
    assert (mode.read, mode.sent) == (1, 2 * batches), "x and y of each batch"
    assert [score.sizes for score in scores] == [[BATCH // 2] * 2] * batches


@pytest.mark.parametrize(
    ("method", "norm", "reads"), [*((name, False, 2) for name in CATALOGUE), ("scaffold", True, 3), ("fedavg", True, 3)]
)
def test_a_clients_round_reads_twice(method: str, norm: bool, reads: int) -> None:
    """The losses and largest entries in one copy, the norm of the update; of a model with BatchNorm its buffers."""
    layers = [nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4)] if norm else [nn.Linear(5, 4)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 3)).double()
    fed = play(federation(method, model=model), [[0, 1], [0, 2]])
    state = fed.state.sent(fed.algorithm)
    broadcast = type(state).unflatten(state.round, {k: v.to("meta") for k, v in state.flatten().items()})
    memory, on_meta, reduction = fed.memories.get(0, Memory()), FlatModel(fed.model.to("meta")), Reduction(0, 2)
    with ReadsGiveZeros() as mode:
        steps = local_update(on_meta, fed.clients[0], fed.algorithm, training(), broadcast, memory, client=0, seed=7)
        reduction.add(drain(steps))
    assert mode.read == reads


def test_a_rule_that_raises_because_of_a_loss_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(*_: object) -> Any:
        raise ArithmeticError("a number that is not finite")

    monkeypatch.setattr("fedlesam.core.client.finish", finish)
    fed = federation("fedavg")
    with pytest.raises(ArithmeticError):
        fed.round([0])
    x, y = fed.clients[0]
    fed.clients[0] = (x * torch.nan, y)  # type: ignore[index]
    with pytest.raises(NotFinite, match="client 0: the loss of step 0 is not finite"):
        fed.round([0])


def test_what_is_read_and_sent_is_counted() -> None:
    there = torch.zeros(3, device="meta")
    with ReadsGiveZeros() as mode:
        assert float(there.sum()) == 0
        assert there.tolist() == [0, 0, 0]
        assert mode.read == 2
        there[torch.arange(2)].add_(torch.ones(2).to("meta"))
    assert (mode.read, mode.sent) == (2, 2)


class ResetsGradients(nn.Module):
    """Some models clear gradients in their forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad(set_to_none=True)
        output: Tensor = self.inner(x)
        return output


def test_a_model_that_resets_its_gradients_trains_all_the_same() -> None:
    torch.manual_seed(0)
    resets = ResetsGradients()
    plain = nn.Sequential(nn.Linear(5, 3, dtype=torch.float64))
    plain[0].load_state_dict(resets.inner.state_dict())
    one, other = (play(federation("fedsam", model=m, clients=samples()), [[0, 1]]) for m in (resets, plain))
    assert torch.equal(one.weights, other.weights)


def counted(steps: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        steps()
    return sum(event.name.startswith("aten::") for event in found.events())


@functools.cache
def bare_operations(passes: int) -> int:
    """Of two steps of SGD, or of SAM, as one writes them."""
    model, (x, y) = mlp((5, 6, 4, 3)), samples((12,))[0]
    parameters = list(model.parameters())
    optimiser = torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-3)
    order = torch.arange(12)

    def backward(indices: Tensor) -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()

    def step(number: int) -> None:
        indices = order[4 * number : 4 * number + 4]
        backward(indices)
        if passes == 2:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            with torch.no_grad():
                moves = [p.grad * (0.1 / (norm + 1e-7)) for p in parameters if p.grad is not None]
                torch._foreach_add_(parameters, moves)
                backward_at = torch.enable_grad()(backward)
                backward_at(indices)
                torch._foreach_sub_(parameters, moves)
        nn.utils.clip_grad_norm_(parameters, 10.0)
        optimiser.step()

    step(0)
    return counted(lambda: (step(1), step(2)))


@pytest.mark.parametrize("method", CATALOGUE)
def test_a_step_does_no_more_operations_than_a_bare_loop(method: str) -> None:
    """But for a teacher, whose forward pass comes on top."""
    clients = samples((12, 12))
    fed = play(federation(method, model=mlp((5, 6, 4, 3)), clients=clients, local=training(epochs=5)), [[0, 1]])
    steps = steps_in(fed, 0)
    next(steps)
    next(steps)
    made = counted(lambda: (next(steps), next(steps)))
    steps.close()
    rule = fed.algorithm.perturbation
    allowed = bare_operations(rule.passes)
    assert made <= allowed * (1 if not rule.teaches else 1.6)

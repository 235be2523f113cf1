"""The round loop, and the class most people use."""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlesam import evaluation, lookup, seeds
from fedlesam.algorithms import Algorithm
from fedlesam.checks import check_choice, check_count
from fedlesam.client import finish, local_steps
from fedlesam.data.batches import Batches, ClientData, check_client, known_labels
from fedlesam.evaluation import PerClient, evaluate
from fedlesam.local import LocalTraining
from fedlesam.messages import Memory
from fedlesam.models.flat import FlatModel
from fedlesam.reduction import Reduction
from fedlesam.server import ServerState, server_step


@dataclass(frozen=True)
class Record:
    """What one round did; a line of metrics.jsonl."""

    round: int
    """From 0, as t in the learning rate lr * decay ** t."""
    active: list[int]
    train_loss: float
    """Mean over the active clients of the mean over their local steps."""
    test_loss: float | None
    test_accuracy: float | None
    lr: float
    seconds: float
    """Training and aggregation; evaluation is not counted."""
    backward_passes: int
    bytes_down: int
    bytes_up: int
    divergence: float
    """Mean over the active clients of norm(v_i - w_next) ** 2."""
    per_client: PerClient | None = None
    """Test accuracy on every client's own mixture of classes, when asked for and evaluated."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what was not measured is left out."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def count_active(active: int | float, clients: int) -> int:
    """How many clients a round has: an int is a count, a float a share of them."""
    if isinstance(active, bool) or not isinstance(active, int | float):
        raise ValueError(f"active must be a count (int) or a share (float), got {active!r}")
    if isinstance(active, int):
        if not 1 <= active <= clients:
            raise ValueError(f"active must be from 1 to the number of clients, {clients}, got {active}")
        return active
    if not 0 < active <= 1:
        raise ValueError(f"active as a share must be above 0 and at most 1, got {active}; a count is an int, e.g. 10")
    return max(1, round(float(active) * clients))


class Federation:
    """A global model, its clients and a method; `round()` trains one communication round.

    `model` is any nn.Module: its weights are the first global model, and it is copied, not changed. `clients` are
    pairs of tensors (x, y) or torch Datasets. `algorithm` is a name of the catalogue or an Algorithm. `active` is a
    count (int) or a share (float) of the clients. `weighting="examples"` weights clients by their number of samples.
    The same seed and number of threads give the same bits.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[ClientData],
        algorithm: str | Algorithm = "fedavg",
        local: LocalTraining | None = None,
        active: int | float = 1.0,
        test: ClientData | None = None,
        seed: int = 0,
        threads: int | None = None,
        *,
        weighting: Literal["clients", "examples"] = "clients",
        evaluate_every: int = 1,
        per_client: bool = False,
    ) -> None:
        self.algorithm = lookup.get(algorithm) if isinstance(algorithm, str) else algorithm
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(f"algorithm must be a name or an Algorithm, got {algorithm!r}")
        check_count("Federation", "seed", seed, at_least=0)
        if threads is not None:
            check_count("Federation", "threads", threads)
        check_choice("Federation", "weighting", weighting, ("clients", "examples"))
        if weighting == "examples" and self.algorithm.plain_mean_rules:
            raise ValueError(
                f"weighting by examples does not work with {', '.join(self.algorithm.plain_mean_rules)}: "
                'the server state of these rules is a plain mean over clients; use weighting="clients"'
            )
        check_count("Federation", "evaluate_every", evaluate_every)
        if len(clients) == 0:
            raise ValueError("there are no clients")
        for number, data in enumerate(clients):
            check_client(data, f"client {number}")
        self.clients, self.local, self.seed, self.threads = clients, local or LocalTraining(), seed, threads
        self.active = count_active(active, len(clients))
        self.weighting, self.evaluate_every = weighting, evaluate_every

        self._model = copy.deepcopy(model)
        self._flat = FlatModel(copy.deepcopy(model))
        self._test: Batches | None = None
        if test is not None:
            check_client(test, "the test set")
            self._test = Batches(test, self._flat.device)
        outputs = check_outputs(self._flat, clients, test, self.local)
        self._mixtures = _mixtures(clients, outputs) if per_client else None
        self.state = ServerState.initial(self.algorithm, self._flat.weights.clone(), self._flat.buffers())
        self.memories: dict[int, Memory] = {}

    @property
    def weights(self) -> Tensor:
        """The trainable parameters of the global model as one flat vector, in `model.parameters()` order."""
        return self.state.weights.clone()

    @property
    def model(self) -> nn.Module:
        """The global model itself, in eval mode, ready to use or save."""
        with torch.no_grad():
            trainable = (p for p in self._model.parameters() if p.requires_grad)
            for parameter, piece in zip(trainable, self._flat.views(self.state.weights), strict=True):
                parameter.copy_(piece)
            for name, value in self.state.buffers.items():
                self._model.get_buffer(name).copy_(value)
        return self._model.eval()

    def draw_active(self, round: int) -> list[int]:
        """The active clients of a round: uniform without replacement, in the order of their numbers."""
        draw = np.random.default_rng(seeds.derive(self.seed, "participation", round))
        return sorted(int(i) for i in draw.choice(len(self.clients), self.active, replace=False))

    def round(self, active: Sequence[int] | None = None) -> Record:
        """One communication round, with the drawn clients or just these. On any error nothing has changed."""
        chosen = self.draw_active(self.state.round) if active is None else self._check_active(active)
        sent, before = self.state.broadcast(), self._flat.backward_passes
        reduction, memories = Reduction(sent.round, by_examples=self.weighting == "examples"), {}
        bytes_up, began = 0, time.perf_counter()
        with seeds.untouched(self._flat.device), _threads(self.threads):
            for client in chosen:
                memory = self.memories.get(client, Memory())
                steps = local_steps(
                    self._flat,
                    self.clients[client],
                    self.algorithm,
                    self.local,
                    sent,
                    memory,
                    client=client,
                    seed=self.seed,
                )
                try:
                    answer = finish(steps)
                except Exception as error:
                    error.add_note(f"while training client {client} in round {sent.round}")
                    raise
                reduction.add(answer)
                memories[client] = answer.memory
                bytes_up += answer.nbytes
            state = server_step(self.algorithm, self.state, reduction, len(self.clients))
            seconds = time.perf_counter() - began
            tested, per_client = None, None
            if self._test is not None and state.round % self.evaluate_every == 0:
                self._flat.load(state.weights, state.buffers)
                tested = evaluate(self._flat, self._test, self.local.loss)
                if self._mixtures is not None and tested.by_class is not None:
                    per_client = evaluation.per_client(tested.by_class, self._mixtures)
        record = Record(
            round=sent.round,
            active=chosen,
            train_loss=reduction.loss,
            test_loss=tested.loss if tested else None,
            test_accuracy=tested.accuracy if tested else None,
            lr=reduction.lr,
            seconds=seconds,
            backward_passes=self._flat.backward_passes - before,
            bytes_down=sent.nbytes * len(chosen),
            bytes_up=bytes_up,
            divergence=reduction.divergence(state.weights - sent.weights),
            per_client=per_client,
        )
        self.state, self.memories = state, {**self.memories, **memories}
        return record

    def run(self, rounds: int) -> Iterator[Record]:
        """Train `rounds` more rounds, a record each."""
        check_count("run", "rounds", rounds)
        for _ in range(rounds):
            yield self.round()

    def _check_active(self, active: Sequence[int]) -> list[int]:
        for i in active:
            if isinstance(i, bool) or not isinstance(i, int | np.integer):
                raise ValueError(f"active must list client numbers, e.g. [0, 3], got {i!r} in {list(active)}")
        chosen = sorted(int(i) for i in active)
        if not chosen:
            raise ValueError("active is empty: a round needs at least one client")
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"active names a client twice: {chosen}")
        if chosen[0] < 0 or chosen[-1] >= len(self.clients):
            raise ValueError(f"active names clients outside 0 to {len(self.clients) - 1}: {chosen}")
        return chosen


def check_outputs(
    model: FlatModel, clients: Sequence[ClientData], test: ClientData | None, local: LocalTraining
) -> int:
    """Show the model one sample, and check all labels against its number of outputs, before any work is done."""
    with seeds.untouched(model.device):
        x, _ = Batches(clients[0], model.device).fetch(torch.tensor([0]), seed=0)
    model.module.eval()
    try:
        with torch.no_grad(), seeds.untouched(model.device):
            output = model.forward(x)
    except Exception as error:
        raise ValueError(
            f"the model does not take inputs of shape {tuple(x.shape)}, as client 0 has: {error}"
        ) from error
    outputs = output.shape[-1] if output.ndim else 1
    if local.loss is not F.cross_entropy or output.ndim != 2:
        return outputs
    named = [(f"client {i}", data) for i, data in enumerate(clients)]
    for where, data in [*named, ("the test set", test)] if test is not None else named:
        labels = known_labels(data)
        if labels is None or labels.is_floating_point():
            continue
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= outputs:
            wrong = low if low < 0 else high
            raise ValueError(f"{where}: label {wrong} is outside 0 to {outputs - 1}, the model's {outputs} outputs")
    return outputs


def _mixtures(clients: Sequence[ClientData], classes: int) -> Tensor:
    rows = []
    for i, data in enumerate(clients):
        labels = known_labels(data)
        if labels is None or labels.is_floating_point() or labels.ndim != 1:
            raise ValueError(f"client {i}: per_client needs class numbers known in advance, as in a pair (x, y)")
        rows.append(evaluation.mixture(labels, classes))
    return torch.stack(rows)


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)

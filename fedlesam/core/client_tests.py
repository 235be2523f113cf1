"""The metrics of a global model on every client's own test samples, in batches that hold samples of many clients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlesam.core.batches import Batch, Batches, ClientData, Collate, Loadable, Streamed, check_client, given_tensors
from fedlesam.core.evaluation import BATCH, BatchScore, PerClient, kept_tensor, spread_over
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.metrics import Metric
from fedlesam.core.sound import Clients, NamedTests, blame_targets, check_finite
from fedlesam.core.task import Task
from fedlesam.core.tree import join, move, tree_items, tree_map
from fedlesam.core.vectors import read_at_once

Tests = Sequence[ClientData | None]
"""The test samples of every client; None of one that has none."""

NOBODY = "test_clients has no samples of any client; give some (a share needs clients with two), or leave it out"


class Piece(NamedTuple):
    """Some samples of one client, in a row."""

    client: int
    """Its number."""
    start: int
    """The first of its samples."""
    end: int
    """The one after the last."""


@dataclass(frozen=True)
class ClientScore:
    """The result on one batch, by client."""

    number: tuple[int, int]
    """The batch, and the part of it where its clients had to be scored one by one: their order."""
    clients: list[int]
    """Those that have samples in the batch."""
    sizes: list[int]
    """Samples of each of them in this batch."""
    loss: float
    """Mean over the samples of the batch."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Of metrics that add up: a row for each of the clients, in double precision."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Outputs and targets of the whole batch, where a metric needs those of all samples of a client."""

    def as_batch(self, number: int) -> BatchScore:
        """The same for all samples of the batch together.

        Args:
            number: Of the batch.
        """
        sums = {name: rows.sum(0).tolist() for name, rows in self.sums.items()}
        return BatchScore(number, sum(self.sizes), self.loss, sums, self.kept)


class _Scored(NamedTuple):
    """A batch of which loss and sums are still on the device."""

    number: tuple[int, int]
    pieces: list[Piece]
    loss: Tensor
    sums: dict[str, Tensor]
    kept: dict[str, Tensor]


class ClientTests:
    """The test samples of all clients, one after the other, cut into batches of a fixed size.

    Args:
        data: Of every client; None of one without. A sequence that makes its items is read in every evaluation.
        collate: Makes a batch of samples that are not tensors yet.
        check: Refuses data by their name whose targets the loss does not take; None where that is done.
    """

    def __init__(
        self, data: Tests, collate: Collate | None = None, check: Callable[[Clients, NamedTests], None] | None = None
    ) -> None:
        self.data, self.collate, self.check = data, collate, check
        self._plans: dict[tuple[bool, bool], list[list[Piece]]] = {}

    def plan(self, alone: bool, join_last: bool = False) -> list[list[Piece]]:
        """The batches. Only samples of one form share a batch.

        Args:
            alone: Whether each client has batches of its own.
            join_last: A last batch of one sample joins the one before, as BatchNorm without statistics needs.
        """
        if (alone, join_last) not in self._plans:
            found: list[list[Piece]] = []
            for pieces in self._alike(alone):
                cut = list(_cut(pieces))
                if join_last and len(cut) > 1 and sum(end - start for _, start, end in cut[-1]) == 1:
                    cut[-2:] = [cut[-2] + cut[-1]]
                found += cut
            self._plans[alone, join_last] = found
        return self._plans[alone, join_last]

    def _alike(self, alone: bool) -> Iterator[list[Piece]]:
        """All samples, cut where their form changes."""
        held: list[Piece] = []
        last: object = None
        for client in range(len(self.data)):
            if (data := self.data[client]) is None:
                continue
            form = client if alone else _form(data)
            if held and form != last:
                yield held
                held = []
            last, whose = form, f"the test samples of client {client}"
            held.append(Piece(client, 0, check_client(data, whose)))
            if self.check is not None:
                self.check({}, {whose: data})
        if not held:
            raise ValueError(NOBODY)
        yield held

    def first(self, device: torch.device) -> Batches:
        """Of the first client that has some.

        Args:
            device: Where its batches go.
        """
        for client in range(len(self.data)):
            if (data := self.data[client]) is not None:
                check_client(data, f"the test samples of client {client}")
                return Batches(data, device, self.collate)
        raise ValueError(NOBODY)

    def fetch(self, pieces: Sequence[Piece], device: torch.device) -> Batch:
        """One batch.

        Args:
            pieces: Of one form.
            device: Where it goes.
        """
        data: list[Any] = [self.data[piece.client] for piece in pieces]
        if given_tensors(data[0]) is None and not isinstance(data[0], Loadable):
            samples = _Chain([(one, piece) for one, piece in zip(data, pieces, strict=True)])
            return Batches(samples, device, self.collate).fetch(torch.arange(len(samples)), seed=0)
        parts = [_rows(one, piece) for one, piece in zip(data, pieces, strict=True)]
        if len(parts) > 1:
            return move(join(torch.cat, parts), device)
        one = tree_map(torch.clone, parts[0]) if device.type == "cpu" else parts[0]  # a model may change its inputs
        return move(one, device)


def _cut(pieces: list[Piece]) -> Iterator[list[Piece]]:
    held: list[Piece] = []
    room = BATCH
    for client, start, end in pieces:
        while start < end:
            upto = min(end, start + room)
            held.append(Piece(client, start, upto))
            room, start = room - (upto - start), upto
            if not room:
                yield held
                held, room = [], BATCH
    if held:
        yield held


class _Chain(Dataset[Any]):
    """Samples of several clients as one Dataset."""

    def __init__(self, parts: list[tuple[Any, Piece]]) -> None:
        self.places = [(data, place) for data, piece in parts for place in range(piece.start, piece.end)]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Any:
        data, place = self.places[number]
        return data[place]


def _form(data: ClientData) -> object:
    """What batches must agree in to become one."""
    given = given_tensors(data)
    if given is None:
        return type(data) if isinstance(data, Loadable) else "samples"
    return tuple((path, leaf.dtype, leaf.shape[1:]) for path, leaf in tree_items(given))


def _rows(data: Any, piece: Piece) -> Batch:
    given, rows = given_tensors(data), slice(piece.start, piece.end)
    if given is None and isinstance(data, Streamed):
        return data.batch(rows)
    return tree_map(lambda tensor: tensor[rows], data.tensors() if given is None else given)


@torch.no_grad()
def score_clients(
    model: FlatModel,
    tests: ClientTests,
    task: Task,
    part: int = 0,
    parts: int = 1,
    check: Callable[[], None] = lambda: None,
) -> list[ClientScore]:
    """Score every `parts`-th batch.

    Args:
        model: The model.
        tests: The clients' test samples.
        task: How a batch becomes a loss, and what is measured. Without metrics the loss is, client by client.
        part: The number of the first batch.
        parts: The number of processes that share the batches.
        check: Called before each batch; it may raise.
    """
    model.module.eval()
    before = model.buffers() if model.state.own else {}
    plan, found = tests.plan(not task.measured, model.needs_batch), list[_Scored]()
    for number in range(part, len(plan), parts):
        check()
        pieces = plan[number]
        model.load_buffers(before)
        try:
            scored = _score(model, tests, task, pieces, (number, 0))
            if scored is None:  # outputs that are no rows of samples
                scored = []
                for place, piece in enumerate(pieces):
                    model.load_buffers(before)
                    scored += _score(model, tests, task, [piece], (number, place)) or []
        except Exception as error:
            error.add_note(f"while evaluating on the test samples of {_names(pieces)}")
            for piece in pieces:
                own = tests.fetch([piece], model.device)
                blame_targets(model, task, own, f"the test samples of client {piece.client}")
            raise
        found += scored
    read = iter(read_at_once([tensor for one in found for tensor in (one.loss, *one.sums.values())]))
    return [_read(one, read, tests, model.device) for one in found]


def _read(one: _Scored, read: Iterator[Tensor], tests: ClientTests, device: torch.device) -> ClientScore:
    """The score, whose numbers come next."""
    loss = float(next(read))
    if not np.isfinite(loss):
        check_finite(tests.fetch(one.pieces, device), f"the test samples of {_names(one.pieces)}")
    clients, sizes = [piece.client for piece in one.pieces], [piece.end - piece.start for piece in one.pieces]
    return ClientScore(one.number, clients, sizes, loss, {name: next(read) for name in one.sums}, one.kept)


def _score(
    model: FlatModel, tests: ClientTests, task: Task, pieces: list[Piece], number: tuple[int, int]
) -> list[_Scored] | None:
    """None if several clients are in the batch, and what is whose cannot be told."""
    batch, sizes = tests.fetch(pieces, model.device), [piece.end - piece.start for piece in pieces]
    done = model.step(task, batch)
    sums, kept = dict[str, Tensor](), dict[str, Tensor]()
    if task.measured:
        outputs, targets = done.outputs, task.targets_of(batch)
        if len(pieces) > 1 and not all(_is_rows(of, sum(sizes)) for of in (outputs, targets)):
            return None
        cut = _by_client(outputs, targets, sizes)
        for name, metric in task.measured.items():
            if metric.finish is None:
                kept = kept or {"outputs": kept_tensor(outputs, "outputs"), "targets": kept_tensor(targets, "targets")}
                continue
            terms = [metric.term(name, *of) for of in cut]
            known = [term for term in terms if term is not None]
            if len(known) == len(terms):
                sums[name] = torch.stack(known)
    return [_Scored(number, pieces, done.loss.clone(), sums, kept)]  # a model may use its tensors again


def _by_client(outputs: Any, targets: Any, sizes: list[int]) -> list[tuple[Any, Any]]:
    """The rows of each client; of one client all, however many there are."""
    if len(sizes) == 1:
        return [(outputs, targets)]
    return list(zip(torch.split(outputs, sizes), torch.split(targets, sizes), strict=True))


def _is_rows(tensor: Any, size: int) -> bool:
    return isinstance(tensor, Tensor) and tensor.ndim > 0 and len(tensor) == size


def _names(pieces: Sequence[Piece]) -> str:
    first, last = pieces[0].client, pieces[-1].client
    return f"client {first}" if first == last else f"clients {first} to {last}"


def over_clients(scores: list[ClientScore], task: Task, clients: int) -> dict[str, PerClient]:
    """The metrics of the task over clients: mean, worst tenth and spread; the loss where it has none.

    Args:
        scores: Of all batches, in any order.
        task: That they were scored by.
        clients: How many there are.
    """
    ordered = sorted(scores, key=lambda score: score.number)
    owners = np.array([client for score in ordered for client in score.clients], dtype=np.int64)
    sizes = np.array([size for score in ordered for size in score.sizes], dtype=np.int64)
    known = np.unique(owners)
    if not task.measured:
        losses = np.array([score.loss for score in ordered for _ in score.clients])
        total, count = np.zeros(clients), np.zeros(clients)
        np.add.at(total, owners, losses * sizes)
        np.add.at(count, owners, sizes)
        return {"loss": spread_over((total / np.maximum(count, 1))[known], clients, smaller=True)}
    found = dict[str, PerClient]()
    for name, metric in task.measured.items():
        if metric.finish is None:
            values = [_of_client(client, name, metric, *both) for client, both in _whole(ordered)]
        elif all(name in score.sums for score in ordered):
            rows = torch.cat([score.sums[name] for score in ordered]).numpy()
            sums = np.zeros((clients, *rows.shape[1:]))
            np.add.at(sums, owners, rows)
            values = [metric.of_sum(name, total) for total in torch.from_numpy(sums[known])]
        else:
            continue
        found[name] = spread_over(np.array(values), clients, smaller=task.is_smaller(name))
    return found


def _of_client(client: int, name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    try:
        return metric.of(name, outputs, targets)
    except ValueError as error:
        raise ValueError(
            f"on the test samples of client {client} {error}; if a metric is not defined for a client, return "
            'float("nan")'
        ) from error


def _whole(ordered: list[ClientScore]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """All outputs and targets of each client, in the order of clients."""
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for score in ordered:
        outputs, targets = score.kept["outputs"], score.kept["targets"]
        for client, both in zip(score.clients, _by_client(outputs, targets, score.sizes), strict=True):
            parts.setdefault(client, []).append(both)
    for client in sorted(parts):
        outputs, targets = (torch.cat(of) for of in zip(*parts[client], strict=True))
        yield client, (outputs, targets)

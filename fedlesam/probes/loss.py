"""The global loss F as every probe sees it: a function of the flat weights, on a model of its own."""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlesam.core import seeds
from fedlesam.core.batches import Batch, Batches, ClientData, size_of
from fedlesam.core.checks import check_count
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.metrics import hits
from fedlesam.core.task import Loss, Task
from fedlesam.core.tree import is_rows, join, tree_map
from fedlesam.federation import Federation

BATCH = 250
"""Samples per pass. Fixed: another number would change the last bits."""


class Unreadable(ArithmeticError):
    """The loss, or a derivative of it, is not finite at a model."""


class GlobalLoss:
    """F(w), the mean over clients of their mean training loss: eval mode, no augmentation, no weight decay.

    The module is copied, and no global random generator is used: training does not change.

    Args:
        module: The model.
        clients: The data of the clients.
        task: How a batch becomes a loss; or a loss of outputs and targets, a mean over its batch.
        samples: About how many samples to use, the same number of each client and at least one; None takes all.
        seed: Of the choice of the samples.
    """

    def __init__(
        self,
        module: nn.Module,
        clients: Sequence[ClientData],
        task: Task | Loss = F.cross_entropy,
        samples: int | None = None,
        seed: int = 0,
    ) -> None:
        if samples is not None:
            check_count("GlobalLoss", "samples", samples)
        self.model = FlatModel(copy.deepcopy(module))
        self.task = task if isinstance(task, Task) else Task.of_loss(task)
        self.model.module.eval()
        self.data, self.chosen = clients, list(range(len(clients)))
        share = None if samples is None else max(1, samples // len(clients))
        self.sizes = {i: min(size_of(data), share or size_of(data)) for i, data in enumerate(clients)}
        self._held: dict[int, list[tuple[Batch, int]]] = {}
        for i, data in enumerate(clients if share is not None else ()):
            order = torch.randperm(size_of(data), generator=seeds.generator(seed, "probe", i))
            self._held[i] = self._load(i, order[: self.sizes[i]].sort().values)

    @classmethod
    def of(cls, federation: Federation, samples: int | None = None) -> Self:
        """The loss that a federation trains, with its current buffers.

        Args:
            federation: Whose model, clients and loss to take.
            samples: About how many samples to use; None takes all.
        """
        return cls(federation.model, federation.clients, federation.task, samples, federation.seed)

    @property
    def samples(self) -> int:
        """How many samples are used."""
        return sum(self.sizes[i] for i in self.chosen)

    def only(self, client: int) -> Self:
        """F_i, the loss of one client, on the same samples.

        Args:
            client: Its number.
        """
        alone = copy.copy(self)
        alone.chosen = [client]
        return alone

    def value(self, weights: Tensor) -> float:
        """F(w).

        Args:
            weights: Of the model, flat.
        """
        return self.score(weights)[0]

    @torch.no_grad()
    def score(self, weights: Tensor) -> tuple[float, float]:
        """F(w) and the accuracy, a share; NaN if the targets are not class numbers.

        Args:
            weights: Of the model, flat.
        """
        self.model.weights.copy_(weights)
        loss, accuracy = 0.0, 0.0
        for batch, share in self._batches():
            done = self.model.step(self.task, batch)
            loss += share * done.loss.item()
            counts = hits(done.outputs, self.task.targets_of(batch)) if self.task.by_class else None
            accuracy += share * float(counts[0].sum() / counts[1].sum().double()) if counts is not None else math.nan
        return loss, accuracy

    def gradient(self, weights: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient.

        Args:
            weights: Of the model, flat.
        """
        self.model.weights.copy_(weights)
        loss, total, gradient = 0.0, torch.zeros_like(weights), self.model.scratch("g")
        for batch, share in self._batches():
            loss += share * self.model.backward(self.task, batch, gradient).item()
            total.add_(gradient, alpha=share)
        return loss, total

    def finite_gradient(self, weights: Tensor) -> tuple[float, Tensor]:
        """As `gradient`; raises Unreadable if the loss or its gradient is not finite.

        Args:
            weights: Of the model, flat.
        """
        loss, g = self.gradient(weights)
        if not math.isfinite(loss):
            wrong = [client for client in self.chosen if not math.isfinite(self.only(client).value(weights))]
            whose = (
                f": that of {len(wrong)} of {len(self.chosen)} clients, client {wrong[0]} the first" if wrong else ""
            )
            raise Unreadable(f"the loss is not finite{whose}")
        if not bool(g.isfinite().all()):
            raise Unreadable("the gradient of the loss is not finite")
        return loss, g

    def product(self, weights: Tensor, vector: Tensor) -> Tensor:
        """The Hessian of F times a vector: the gradient of (gradient, vector).

        Args:
            weights: Where the Hessian is taken, flat.
            vector: Flat, too.
        """
        self.model.weights.copy_(weights)
        total, parameters = torch.zeros_like(weights), self.model.parameters
        pieces, along = self.model.views(total), self.model.views(vector)
        for batch, share in self._batches():
            value = self.model.step(self.task, batch).loss
            first = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
            terms = [(g * v).sum() for g, v in zip(first, along, strict=True) if g is not None and g.requires_grad]
            if not terms:
                continue
            second = torch.autograd.grad(torch.stack(terms).sum(), parameters, allow_unused=True)
            for piece, h in zip(pieces, second, strict=True):
                if h is not None:
                    piece.add_(h, alpha=share)
        return total

    def _batches(self) -> Iterator[tuple[Batch, float]]:
        """Batches and their shares in F. Clients of equal size go together, so small ones do not cost a pass each."""
        alike: dict[int, list[int]] = defaultdict(list)
        for client in self.chosen:
            alike[self.sizes[client]].append(client)
        for size, clients in alike.items():
            for batch, count in self._together(clients):
                yield batch, count / (size * len(self.chosen))

    def _together(self, clients: list[int]) -> Iterator[tuple[Batch, int]]:
        """Batches of clients of one size, with the number of their samples; those that cannot be joined stay alone."""
        waiting, count = list[Batch](), 0
        for client in clients:
            for batch, size in self._held[client] if client in self._held else self._load(client, None):
                if not self.task.joins or not is_rows(batch, size):
                    yield batch, size
                    continue
                waiting.append(batch)
                count += size
                if count >= BATCH:
                    whole, full = join(torch.cat, waiting), count - count % BATCH
                    for start in range(0, full, BATCH):
                        yield _part(whole, start, start + BATCH), BATCH
                    waiting, count = [_part(whole, full, count)] if full < count else [], count - full
        if waiting:
            yield join(torch.cat, waiting), count

    def _load(self, client: int, places: Tensor | None) -> list[tuple[Batch, int]]:
        """Samples of a client, all or some; in one piece if they may be joined to those of others."""
        batches, joins = Batches(self.data[client], self.model.device, self.task.collate), self.task.joins
        chosen = torch.arange(len(batches)) if places is None else places
        parts = [chosen] if joins else list(torch.split(chosen, BATCH))
        with seeds.preserve_rng(self.model.device):
            if joins and places is None:
                return [(batches.fetch(slice(None), seed=0), len(batches))]
            return [(batches.fetch(part, seed=0), len(part)) for part in parts]


def _part(batch: Batch, start: int, end: int) -> Batch:
    return tree_map(lambda tensor: tensor[start:end], batch)

"""The batches of one client in one round, drawn for whole batches at a time."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedlesam.core import seeds

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Changes a whole batch of inputs at once, drawing only from the generator it is given."""

Batch = tuple[Tensor, Tensor]


@runtime_checkable
class Loadable(Protocol):
    """A client whose samples can be had as two tensors, loaded when it trains and dropped afterwards."""

    def __len__(self) -> int: ...
    def tensors(self) -> Batch: ...
    def labels(self) -> Tensor: ...


@runtime_checkable
class Streamed(Loadable, Protocol):
    """A Loadable that can also give a batch alone, and does if it is large."""

    @property
    def streams(self) -> bool: ...
    def batch(self, chosen: Tensor | slice) -> Batch: ...


ClientData = Batch | Dataset[Any] | Loadable
"""What a user may give as one client: a pair (x, y), a torch Dataset of such samples, or a Loadable."""


def check_client(data: Any, where: str) -> int:
    """The number of samples, or a ValueError that says which client is wrong and why."""
    if isinstance(data, tuple | list):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            kinds = [type(part).__name__ for part in data]
            raise ValueError(f"{where}: expected a pair of tensors (x, y), got {kinds}")
        if len(data[0]) != len(data[1]):
            raise ValueError(f"{where}: x has {len(data[0])} samples and y has {len(data[1])}")
        size = len(data[0])
    elif isinstance(data, TensorDataset) and len(data.tensors) != 2:
        raise ValueError(f"{where}: a TensorDataset must hold two tensors, x and y; this one holds {len(data.tensors)}")
    elif (
        not isinstance(data, Tensor)
        and hasattr(data, "__len__")
        and (hasattr(data, "__getitem__") or isinstance(data, Loadable))
    ):
        size = len(data)
    else:
        raise ValueError(f"{where}: expected (x, y) tensors or a map-style torch Dataset, got {type(data).__name__}")
    if size == 0:
        raise ValueError(f"{where}: has no samples; leave it out")
    return size


def size_of(data: ClientData) -> int:
    """The number of samples of a client.

    Args:
        data: The client's samples.
    """
    return len(data[0]) if isinstance(data, tuple | list) else len(data)  # type: ignore[arg-type]


def pair_of(data: ClientData) -> Batch | None:
    """The two tensors a user gave; None where samples are made or loaded when they are needed.

    Args:
        data: The client's samples.
    """
    given = data.tensors if isinstance(data, TensorDataset) else data
    return (given[0], given[1]) if isinstance(given, tuple | list) and len(given) == 2 else None


def as_tensors(data: ClientData) -> Batch | None:
    """The samples as two tensors, or None where each sample would have to be read for that.

    Args:
        data: The client's samples.
    """
    pair = pair_of(data)  # asked first: a protocol's isinstance is slow
    return data.tensors() if pair is None and isinstance(data, Loadable) else pair


def known_labels(data: ClientData) -> Tensor | None:
    """The targets, or None where each sample would have to be read for that.

    Args:
        data: The client's samples.
    """
    if isinstance(data, Loadable):
        return data.labels()
    pair = as_tensors(data)
    return pair[1] if pair is not None else None


def steps_per_epoch(size: int, batch_size: int, join_last: bool) -> int:
    """The number of batches of an epoch: ceil(size / batch_size), or one less by `join_last`.

    Args:
        size: The number of samples.
        batch_size: Samples of a batch.
        join_last: A last batch of one sample joins the one before, as BatchNorm needs.
    """
    full, rest = divmod(size, batch_size)
    return full + (rest > 0) - (join_last and rest == 1 and full > 0)


def batch_indices(
    size: int, batch_size: int, epochs: int, join_last: bool, rng: torch.Generator, device: torch.device | None = None
) -> Iterator[Tensor | slice]:
    """The places of the samples of each batch. An epoch visits each sample once, in a new order.

    Args:
        size: The number of samples.
        batch_size: Samples of a batch.
        epochs: How often each sample is visited.
        join_last: A last batch of one sample joins the one before, as BatchNorm needs.
        rng: Draws the orders. A batch of all samples draws nothing and keeps their order.
        device: Where the places go, in one copy an epoch; None leaves them on the CPU.
    """
    steps = steps_per_epoch(size, batch_size, join_last)
    for _ in range(epochs):
        if steps == 1:
            yield slice(None)
            continue
        order = torch.randperm(size, generator=rng)
        order = order if device is None else order.to(device, non_blocking=True)
        for step in range(steps):
            yield order[step * batch_size : (step + 1) * batch_size if step < steps - 1 else size]


RESIDENT = 2 << 30
"""Bytes of a client's samples that may lie on a GPU while it trains; larger ones are sent batch by batch."""


class Batches:
    """Fetches batches of one client: by one indexing where its samples are tensors, else sample by sample.

    Args:
        data: The client's samples.
        device: Where the batches go.
    """

    def __init__(self, data: ClientData, device: torch.device) -> None:
        self.streamed = data if pair_of(data) is None and isinstance(data, Streamed) and data.streams else None
        self.tensors = as_tensors(data) if self.streamed is None else None
        if self.tensors is not None and device.type != "cpu" and sum(t.nbytes for t in self.tensors) <= RESIDENT:
            self.tensors = self.tensors[0].to(device, non_blocking=True), self.tensors[1].to(device, non_blocking=True)
        self.samples: Any = data
        self.device = device

    @property
    def home(self) -> torch.device | None:
        """Where the samples are indexed: on the device if they are there, else on the CPU (None)."""
        return self.device if self.tensors is not None and self.tensors[0].device == self.device else None

    def __len__(self) -> int:
        return len(self.tensors[0] if self.tensors is not None else self.samples)

    def fetch(self, indices: Tensor | slice, seed: int) -> Batch:
        """One batch (x, y) on the device.

        Args:
            indices: The places of its samples.
            seed: For a Dataset that draws random numbers while it makes a sample.
        """
        if self.tensors is not None:
            x, y = self.tensors[0][indices], self.tensors[1][indices]
        elif self.streamed is not None:
            x, y = self.streamed.batch(indices)
        else:
            seeds.reseed_everything(seed, self.device)
            chosen = range(len(self)) if isinstance(indices, slice) else indices.tolist()
            x, y = default_collate([self.samples[i] for i in chosen])
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

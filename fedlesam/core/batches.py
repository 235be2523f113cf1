"""The batches of one client in one round, drawn for whole batches at a time."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedlesam.core import seeds
from fedlesam.core.computing import own_device
from fedlesam.core.staging import Staging, to_device
from fedlesam.core.tree import leaves, move, named_tensors, tree_map

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Changes a whole batch of inputs at once, drawing only from the generator it is given."""

Batch = Any
"""What the samples of a step make together: a pair (x, y), a dict, a nested tuple, or what `collate` returns."""

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


@runtime_checkable
class Loadable(Protocol):
    """A client whose samples can be had as two tensors, loaded when it trains and dropped afterwards."""

    def __len__(self) -> int: ...
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All samples of the client: inputs and targets."""

    def labels(self) -> Tensor:
        """The targets alone."""


@runtime_checkable
class Streamed(Loadable, Protocol):
    """A Loadable that can also give a batch alone, and does if it is large."""

    @property
    def streams(self) -> bool:
        """Whether batches are loaded one by one, not all samples at once."""

    def batch(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Some samples: inputs and targets.

        Args:
            chosen: The numbers of the samples, or a slice of them.
        """


@runtime_checkable
class Stored(Streamed, Protocol):
    """A Streamed whose samples are stored in another form than a model takes: pixels, a quarter of their size."""

    def stays(self, room: int) -> int:
        """Bytes of what can stay on a device from round to round, for all clients together; 0 if nothing can.

        Args:
            room: Bytes that there are for it.
        """

    def on(self, device: torch.device, room: int) -> "Stored":
        """The same samples on a device, if they can stay there; else itself.

        Args:
            device: Where they should be.
            room: Bytes that there are for them.
        """

    def raw(self, chosen: Tensor | slice) -> Batch:
        """Some samples as they are stored, where they are.

        Args:
            chosen: The numbers of the samples, or a slice of them.
        """

    def inputs(self, raw: Batch) -> Batch:
        """What a model takes, made where the samples are.

        Args:
            raw: Samples as they are stored.
        """

    def part(self, places: Tensor) -> "Stored":
        """Some of its samples, as a client.

        Args:
            places: The numbers of the samples.
        """


ClientData = tuple[Any, ...] | list[Any] | Mapping[str, Any] | Dataset[Any] | Loadable
"""What a user may give as one client.

A pair (x, y), a dict or a nested tuple of tensors, with a row for each sample; a torch Dataset, or a list of samples,
of any form; or a Loadable.
"""

TESTS = "the test samples of"
"""How messages name a client's own."""
KINDS = "a client is a pair (x, y), a dict or a nested tuple of tensors, or a map-style torch Dataset"


def check_client(data: Any, where: str) -> int:
    """The number of samples, or a ValueError that says which client is wrong and why.

    Args:
        data: What was given for the client.
        where: What the client is called in the message, e.g. `client 3`.
    """
    given = given_tensors(data)
    if given is not None:
        size = _check_tensors(given, where, alone=isinstance(data, TensorDataset))
    elif (
        not isinstance(data, Tensor)
        and hasattr(data, "__len__")
        and (hasattr(data, "__getitem__") or isinstance(data, Loadable))
    ):
        size = len(data)
    else:
        raise ValueError(f"{where}: expected (x, y) tensors or a map-style torch Dataset, got {type(data).__name__}")
    if size == 0:
        raise ValueError(f"{where}: has no samples; {'give None' if where.startswith(TESTS) else 'leave it out'}")
    return size


def _check_tensors(given: Batch, where: str, alone: bool) -> int:
    parts = leaves(given)
    if not all(isinstance(part, Tensor) for part in parts) or (len(parts) < 2 and type(given) is tuple and not alone):
        kinds = [type(part).__name__ for part in parts]
        remedy = "give torch.from_numpy(x); " if "ndarray" in kinds else ""
        raise ValueError(f"{where}: expected a pair of tensors (x, y), got {kinds}; {remedy}{KINDS}")
    if not parts:
        raise ValueError(f"{where}: has no samples; leave it out")
    (first, tensor), *others = named_tensors(given)
    for name, other in ((first, tensor), *others):
        if other.layout is not torch.strided:
            raise ValueError(
                f"{where}: {name} is {other.layout}; give {name}.to_dense(), or a Dataset that makes samples"
            )
        if other.ndim == 0:
            raise ValueError(f"{where}: {name} is a single number; {KINDS}, with a row for each sample")
        if len(other) != len(tensor):
            raise ValueError(f"{where}: {first} has {len(tensor)} samples and {name} has {len(other)}")
    return len(tensor)


def size_of(data: ClientData) -> int:
    """The number of samples of a client.

    Args:
        data: The client's samples.
    """
    given = given_tensors(data)
    return len(leaves(given)[0]) if given is not None else len(data)  # type: ignore[arg-type]


def given_tensors(data: ClientData) -> Batch | None:
    """The tensors a user gave, as one batch of all samples; None where samples are made when they are needed.

    Args:
        data: The client's samples.
    """
    if isinstance(data, TensorDataset):
        return data.tensors
    if isinstance(data, list):
        return tuple(data) if not data or _is_column(data[0]) else None
    return data if isinstance(data, tuple | Mapping) else None


def _is_column(first: Any) -> bool:
    """Whether the first of a list is a tensor of all samples; anything else is a sample."""
    if isinstance(first, list):
        return any(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves(first))
    return isinstance(first, Tensor | np.ndarray)


def as_tensors(data: ClientData) -> Batch | None:
    """The samples as a batch of tensors, or None where each sample would have to be read for that.

    Args:
        data: The client's samples.
    """
    given = given_tensors(data)  # asked first: a protocol's isinstance is slow
    return data.tensors() if given is None and isinstance(data, Loadable) else given


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
    size: int,
    batch_size: int,
    epochs: int | None,
    join_last: bool,
    rng: torch.Generator,
    device: torch.device | None = None,
) -> Iterator[Tensor | slice]:
    """The places of the samples of each batch. An epoch visits each sample once, in a new order.

    Args:
        size: The number of samples.
        batch_size: Samples of a batch.
        epochs: How often each sample is visited; None never ends.
        join_last: A last batch of one sample joins the one before, as BatchNorm needs.
        rng: Draws the orders. A batch of all samples draws nothing and keeps their order.
        device: Where the places go, in one copy an epoch; None leaves them on the CPU.
    """
    steps = steps_per_epoch(size, batch_size, join_last)
    for _ in itertools.count() if epochs is None else range(epochs):
        if steps == 1:
            yield slice(None)
            continue
        order = torch.randperm(size, generator=rng)
        order = order if device is None else to_device(order, device)
        for step in range(steps):
            yield order[step * batch_size : (step + 1) * batch_size if step < steps - 1 else size]


RESIDENT = 2 << 30
"""Bytes of samples that may lie on a GPU: of a data set from round to round, of a client while it trains.

Larger ones are sent batch by batch.
"""


class Batches:
    """Fetches batches of one client: by one indexing where its samples are tensors, else sample by sample.

    Args:
        data: The client's samples.
        device: Where the batches go.
        collate: Makes a batch of samples that are not tensors yet; by default as PyTorch's DataLoader does.
    """

    def __init__(self, data: ClientData, device: torch.device, collate: Collate | None = None) -> None:
        self.stored: Stored | None = None
        """Samples that become a model's inputs on the device."""
        self.streamed: Streamed | None = None
        self.tensors: Batch | None
        self.home: torch.device | None = None
        """Where the samples are indexed: on the device if they are there, else on the CPU (None)."""
        made = given_tensors(data) is None
        if made and device.type != "cpu" and isinstance(data, Stored):
            self.stored = data.on(device, RESIDENT)
            self.home = device if self.stored is not data else None
            self.tensors = None if data.streams else _inputs_on(self.stored, device)
        else:
            self.streamed = data if made and isinstance(data, Streamed) and data.streams else None
            self.tensors = as_tensors(data) if self.streamed is None else None
        if self.tensors is not None:
            held = leaves(self.tensors)
            self.size = len(held[0])
            if device.type != "cpu" and sum(t.nbytes for t in held) <= RESIDENT:
                self.tensors = move(self.tensors, device)
            if all(t.device == device for t in leaves(self.tensors)):
                self.home = device
            self._flat = type(self.tensors) is tuple and len(held) == len(self.tensors)  # no tree to walk at each step
        else:
            self.size = len(data)  # type: ignore[arg-type]
        self.staging = None if device.type == "cpu" else Staging(device)
        self.samples: Any = data
        self.device, self.collate = device, collate

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process its samples go to the GPU of that one."""
        return _own, (self.samples, self.device.type, self.collate)

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Tensor | slice, seed: int) -> Batch:
        """One batch on the device.

        Args:
            indices: The places of its samples.
            seed: For a Dataset that draws random numbers while it makes a sample.
        """
        if self.tensors is not None:
            if self._flat:
                batch = tuple([_taken(tensor, indices) for tensor in self.tensors])
            else:
                batch = tree_map(lambda tensor: _taken(tensor, indices), self.tensors)
            if self.home is not None:
                return batch
        elif self.stored is not None:
            raw = self.stored.raw(indices)
            return self.stored.inputs(raw if self.staging is None or self.home is not None else self.staging(raw))
        elif self.streamed is not None:
            batch = self.streamed.batch(indices)
        else:
            seeds.reseed_everything(seed, self.device)
            chosen = range(len(self)) if isinstance(indices, slice) else indices.tolist()
            batch = collated([self.samples[i] for i in chosen], self.collate)
        return move(batch, self.device) if self.staging is None else self.staging(batch)


def _taken(tensor: Tensor, indices: Tensor | slice) -> Tensor:
    """A copy: a model may change its inputs, and a slice would be a view of the client's samples."""
    return tensor[indices].clone() if isinstance(indices, slice) else tensor[indices]


def _inputs_on(stored: Stored, device: torch.device) -> Batch | None:
    """All samples of a client as a model takes them; None if they do not fit."""
    raw = stored.raw(slice(None))
    return stored.inputs(move(raw, device)) if sum(t.nbytes for t in leaves(raw)) <= RESIDENT else None


def _own(samples: Any, kind: str, collate: Collate | None) -> Batches:
    return Batches(samples, own_device(kind), collate)


def collated(samples: list[Any], collate: Collate | None) -> Batch:
    """A batch of samples; a ValueError if they cannot be put together, or if some of them are lost.

    Args:
        samples: Of one batch.
        collate: The user's function; by default as PyTorch's DataLoader does.
    """
    if collate is None:
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"samples cannot be combined into a batch ({str(error).splitlines()[0]}); give fl.Task(..., "
                "collate=f), where f makes a batch of a list of samples"
            ) from error
    else:
        try:
            batch = collate(samples)
        except Exception as error:
            raise ValueError(
                f"collate raises {type(error).__name__}: {error}; it is called with a list of {len(samples)} samples, "
                f"the first a {type(samples[0]).__name__}, and returns a batch"
            ) from error
        if batch is None:
            raise ValueError(f"collate returns None for {len(samples)} samples; return a batch of them")
        sizes = {len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0}
        if sizes and len(samples) not in sizes:
            raise ValueError(
                f"collate makes a batch of {max(sizes)} from {len(samples)} samples; it may not drop or add any: "
                "filter the Dataset before it is given, and return a tensor with a row for each sample"
            )
    return tuple(batch) if type(batch) is list else batch

"""A share of every client's samples that it is tested on and never trains on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from fedlesam.core import seeds
from fedlesam.core.batches import ClientData, Loadable, Stored, Streamed, check_client, given_tensors
from fedlesam.core.client_tests import NOBODY, Tests
from fedlesam.core.drawn import is_checked_whole
from fedlesam.core.tree import tree_map


def divide(size: int, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """The places of a client's samples to train on, and of those to test on.

    Of one sample none is for the test; of more at least one is for each.

    Args:
        size: How many there are.
        share: Of them, for the test.
        seed: Of the run.
        client: The number of the client: each draws by itself.
    """
    count = min(max(1, round(share * size)), size - 1)
    order = torch.randperm(size, generator=seeds.generator(seed, "test", client))
    return order[count:].sort().values, order[:count].sort().values


def check_share(share: Any, what: str) -> float:
    """A share between 0 and 1, or a ValueError.

    Args:
        share: What was given.
        what: The name of the setting.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ValueError(f"{what} must be a share above 0 and below 1, e.g. 0.2, got {share!r}")
    return float(share)


def given_tests(
    clients: Sequence[ClientData], tests: Tests | float | None, seed: int
) -> tuple[Sequence[ClientData], Tests | None]:
    """The clients to train, and the test samples of each; None where nobody has any.

    Args:
        clients: Their samples.
        tests: Test samples of every client, or a share of its own.
        seed: Of the run.
    """
    if tests is None:
        return clients, None
    if isinstance(tests, Mapping):
        raise ValueError(
            "test_clients must be a list with an entry for each client, got a dict; use list(tests.values())"
        )
    if isinstance(tests, Iterator):
        raise ValueError(f"test_clients must be a list with an entry for each client, got {tests!r}; use list(tests)")
    if isinstance(tests, int | float | str) or not (hasattr(tests, "__len__") and hasattr(tests, "__getitem__")):
        share = check_share(tests, "test_clients, where it is no list with an entry for each client,")
        clients, tests = hold_out(clients, share, seed)
    if len(tests) != len(clients):
        raise ValueError(
            f"test_clients has {len(tests)} entries, and there are {len(clients)} clients; give one for each, None for "
            "a client without test samples"
        )
    if isinstance(tests, list | tuple) and all(one is None for one in tests):
        raise ValueError(NOBODY)
    return clients, tests


def hold_out(clients: Sequence[ClientData], share: float, seed: int = 0) -> tuple[Sequence[ClientData], Tests]:
    """A share of every client's samples for its own test: what is left to train on, and what is not.

    Args:
        clients: Their samples, in any form a client may have.
        share: Above 0 and below 1; rounded, at least one sample of a client that has two.
        seed: Decides which.
    """
    share = check_share(share, "share")

    def train(number: int) -> ClientData:
        size = check_client(data := clients[number], f"client {number}")
        return part_of(data, divide(size, share, seed, number)[0]) if size > 1 else data

    def test(number: int) -> ClientData | None:
        size = check_client(data := clients[number], f"client {number}")
        return part_of(data, divide(size, share, seed, number)[1]) if size > 1 else None

    if is_checked_whole(clients):
        return [train(i) for i in range(len(clients))], [test(i) for i in range(len(clients))]
    return _Made(train, len(clients)), _Made(test, len(clients))


@dataclass(frozen=True)
class _Made(Sequence[Any]):
    """Parts of clients that are made when they are asked for."""

    make: Callable[[int], Any]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.size:
            raise IndexError(number)
        return self.make(number)


def part_of(data: Any, places: Tensor) -> Any:
    """Some samples of a client, in the form that it has.

    Args:
        data: Its samples.
        places: Of the samples.
    """
    if isinstance(data, TensorDataset):
        return TensorDataset(*(tensor[places] for tensor in data.tensors))
    if (given := given_tensors(data)) is not None:
        return tree_map(lambda tensor: tensor[places], given)
    if isinstance(data, Loadable):
        return data.part(places) if isinstance(data, Stored) else _Part(data, places)
    return [data[i] for i in places.tolist()] if isinstance(data, list) else Subset(data, places.tolist())


@dataclass(frozen=True)
class _Part:
    """Some samples of a Loadable."""

    data: Any
    places: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def labels(self) -> Tensor:
        found: Tensor = self.data.labels()[self.places]
        return found

    @property
    def streams(self) -> bool:
        return isinstance(self.data, Streamed) and self.data.streams

    def batch(self, chosen: Tensor | slice) -> Any:
        if isinstance(self.data, Streamed):
            return self.data.batch(self.places[chosen])
        return tree_map(lambda tensor: tensor[self.places[chosen]], self.data.tensors())

    def tensors(self) -> Any:
        return self.batch(slice(None))

"""The schemes that divide training samples over clients. Each one terminates, or refuses with the reason."""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedlesam.core.hold_out import check_share, divide
from fedlesam.data.dataset import DataSet, Domains, Owners, Shard

Indices = NDArray[np.int64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """The samples of every client. Iterating over a split gives one array of sample numbers per client.

    Attributes:
        scheme: The split as a user types it, e.g. `dirichlet:0.1`.
        clients: For every client the numbers of its samples in the training set.
        samples: The size of the training set.
        drawn: Clients x classes: the proportions that were drawn, where the scheme draws some.
        test: Training samples that form the test set instead, where the scheme leaves some out for it.
        tests: For every client the numbers of its own test samples, none of one without; None where they are not known.
        tests_in: Whether those are numbers in the test set, or in the training set, which they were taken from.
    """

    scheme: str
    clients: list[Indices]
    samples: int
    drawn: NDArray[np.float64] | None = field(default=None, compare=False)
    test: Indices | None = None
    tests: list[Indices] | None = None
    tests_in: Literal["test", "train"] = "test"

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Indices]:
        return iter(self.clients)

    @property
    def sizes(self) -> Counts:
        """The number of samples of every client."""
        return np.array([len(client) for client in self.clients])

    @property
    def repeats(self) -> int:
        """How many samples were assigned again, to another client or the same."""
        return int(self.sizes.sum()) - len(np.unique(np.concatenate(self.clients)))

    @property
    def dropped(self) -> int:
        """How many training samples neither a client nor the test has."""
        used = self.clients if self.test is None else [*self.clients, self.test]
        if self.tests is not None and self.tests_in == "train":
            used = [*used, *self.tests]
        return self.samples - len(np.unique(np.concatenate(used)))

    def class_counts(self, labels: Indices, classes: int) -> Counts:
        """Clients x classes: the number of samples.

        Args:
            labels: The class number of every training sample.
            classes: The number of classes.
        """
        return np.stack([np.bincount(labels[client], minlength=classes) for client in self.clients])

    def deviation(self, labels: Indices) -> float | None:
        """Mean over clients of the total variation between the drawn class proportions and the assigned ones.

        Args:
            labels: The class number of every training sample.

        Returns:
            The mean, or None where the scheme draws no proportions.
        """
        if self.drawn is None:
            return None
        assigned = self.class_counts(labels, self.drawn.shape[1]) / self.sizes[:, None]
        return float(np.abs(assigned - self.drawn).sum(1).mean() / 2)

    @property
    def hash(self) -> str:
        """sha256 of the assignment: equal for equal splits on any machine."""
        digest = hashlib.sha256(self.sizes.astype("<i8").tobytes())
        digest.update(np.concatenate(self.clients).astype("<i8").tobytes())
        if self.test is not None:
            digest.update(b"test" + self.test.astype("<i8").tobytes())
        for own in self.tests or ():
            digest.update((b"own" if self.tests_in == "test" else b"held") + own.astype("<i8").tobytes())
        return digest.hexdigest()

    def hold_out(self, share: float, seed: int = 0) -> "Split":
        """A share of every client's samples for its own test; it does not train on them.

        Args:
            share: Above 0 and below 1; rounded, at least one sample of a client that has two.
            seed: Decides which.

        Raises:
            ValueError: Clients have test samples already, or samples stand with several clients.
        """
        check_share(share, "the share of test samples")
        if self.tests is not None:
            raise ValueError(f"split {self.scheme}: its clients have test samples of their own; leave the share out")
        if self.repeats:
            raise ValueError(
                f"split {self.scheme}: {self.repeats} samples belong to more than one client, so a client could train "
                "on another's test samples; use a split without repeat"
            )
        train, tests = list[Indices](), list[Indices]()
        for client, own in enumerate(self.clients):
            kept, held = divide(len(own), share, seed, client)
            train.append(own[kept.numpy()])
            tests.append(own[held.numpy()])
        return replace(self, clients=train, tests=tests, tests_in="train")

    def shards(self, data: DataSet) -> list[Shard]:
        """The training samples of every client.

        Args:
            data: The data set that it divides.
        """
        return [data.shard(torch.from_numpy(indices)) for indices in self.clients]

    def test_shards(self, data: DataSet) -> list[Shard | None] | None:
        """The test samples of every client, None of one without; None where no client has any.

        Args:
            data: The data set that it divides.
        """
        if self.tests is None:
            return None
        images = data.train if self.tests_in == "train" else data.test
        return [Shard(data, images, torch.from_numpy(own)) if len(own) else None for own in self.tests]


def equal_size(samples: int, clients: int) -> int:
    """The number of samples each of `clients` gets when all get the same."""
    if clients > samples:
        raise ValueError(f"{clients} clients are more than the {samples} training samples: every client needs one")
    return samples // clients


def iid(labels: Indices, clients: int, rng: np.random.Generator) -> Split:
    """Equal sizes, samples at random."""
    size = equal_size(len(labels), clients)
    order = rng.permutation(len(labels))[: size * clients]
    return Split("iid", [np.sort(part) for part in np.split(order, clients)], len(labels))


def pooled(labels: Indices, clients: int, rng: np.random.Generator) -> Split:
    """One client with everything: centralised training."""
    if clients != 1:
        raise ValueError(f"the split pooled has 1 client, got {clients}: leave the number out or set it to 1")
    return Split("pooled", [np.arange(len(labels))], len(labels))


def dirichlet(labels: Indices, clients: int, rng: np.random.Generator, *, beta: float, repeat: bool = False) -> Split:
    """Equal sizes; each client's class proportions are one draw from Dirichlet(beta, ..., beta) over the classes.

    The convention of the paper. With `repeat` a class that runs out is refilled, as in the baselines' code, so that
    samples stand with several clients; without, a client whose class is used up draws from its other classes.
    """
    size = equal_size(len(labels), clients)
    supply = np.bincount(labels)
    present = np.flatnonzero(supply)
    proportions = np.zeros((clients, len(supply)))
    proportions[:, present] = _proportions(rng, beta, len(present), clients)
    counts = rng.multinomial(size, proportions) if repeat else _within_supply(size, proportions, supply, rng)
    scheme = f"dirichlet:{beta:g}{',repeat' if repeat else ''}"
    return Split(scheme, _deal(labels, counts, rng), len(labels), proportions)


def dirichlet_by_class(labels: Indices, clients: int, rng: np.random.Generator, *, beta: float) -> Split:
    """Unequal sizes: each class is divided over the clients by one draw from Dirichlet(beta, ..., beta) over clients.

    A client that gets nothing takes one sample from the largest client of that moment.
    """
    equal_size(len(labels), clients)
    supply = np.bincount(labels)
    counts = np.stack([rng.multinomial(n, _proportions(rng, beta, clients, 1)[0]) for n in supply], axis=1)
    largest = [(-int(size), i) for i, size in enumerate(counts.sum(1))]
    heapq.heapify(largest)
    for empty in np.flatnonzero(counts.sum(1) == 0):
        size, giver = heapq.heappop(largest)
        given = int(counts[giver].argmax())
        counts[giver, given] -= 1
        counts[empty, given] += 1
        heapq.heappush(largest, (size + 1, giver))
    return Split(f"dirichlet-by-class:{beta:g}", _deal(labels, counts, rng), len(labels))


def pathological(labels: Indices, clients: int, rng: np.random.Generator, *, a: int, repeat: bool = False) -> Split:
    """Every client has exactly `a` classes, and the same number of samples of each of them as every other client."""
    supply = np.bincount(labels)
    classes = int((supply > 0).sum())
    if a > classes:
        raise ValueError(f"pathological:{a} gives every client {a} classes, but the data set has only {classes}")
    users = np.zeros(len(supply), dtype=np.int64)
    holds = np.zeros((clients, len(supply)), dtype=np.int64)
    for i in rng.permutation(clients):
        # the classes with the most samples left per client, ties at random: the balance keeps equal shares large
        roomiest = np.lexsort((rng.random(len(supply)), -supply / (users + 1)))
        if repeat:
            roomiest = rng.permutation(np.flatnonzero(supply))
        holds[i, roomiest[:a]] = 1
        users += holds[i]
    share = max(1, len(labels) // clients // a) if repeat else int((supply[users > 0] // users[users > 0]).min())
    if share == 0:
        most = next(n for n in range(len(labels) // a, 0, -1) if np.minimum(supply, n).sum() >= a * n)
        raise ValueError(
            f"pathological:{a} cannot serve {clients} clients with {len(labels)} samples of {classes} classes: "
            f"a class would have more clients than samples; at most {most} clients, or allow "
            f"samples to repeat with pathological:{a},repeat"
        )
    return Split(f"pathological:{a}{',repeat' if repeat else ''}", _deal(labels, holds * share, rng), len(labels))


def by_owner(owners: Sequence[object], scheme: str) -> Split:
    """A natural partition: samples with the same owner are one client, in the owners' sorted order."""
    names, owner = np.unique(np.asarray(owners), return_inverse=True)
    order = np.argsort(owner, kind="stable")
    return Split(scheme, np.split(order, np.cumsum(np.bincount(owner, minlength=len(names)))[:-1]), len(owner))


def natural(owners: Owners) -> Split:
    """The data set's own clients, those with a training sample, in its order."""
    split = by_owner(owners.of, "natural")  # type: ignore[arg-type]
    if owners.test is None:
        return split
    order = np.argsort(owners.test, kind="stable")
    ends = np.searchsorted(owners.test[order], np.unique(owners.of), side="right")
    starts = np.searchsorted(owners.test[order], np.unique(owners.of), side="left")
    return replace(split, tests=[order[start:end] for start, end in zip(starts, ends, strict=True)])


def leave_out(domains: Domains, target: int, rng: np.random.Generator, *, per_domain: int = 1) -> Split:
    """Test on the domain `target`, train on the others, each divided at random over `per_domain` equal clients.

    Where the data set follows its publishers' lists, the target's test list is the test, and the others' train lists
    are trained on.
    """
    listed = domains.test if domains.test is not None else np.zeros(len(domains.of), bool)
    clients: list[Indices] = []
    for number, name in enumerate(domains.names):
        if number != target:
            samples = np.flatnonzero((domains.of == number) & ~listed)
            if per_domain > len(samples):
                raise ValueError(f"{per_domain} clients are more than the {len(samples)} images of the domain {name}")
            order = rng.permutation(samples) if per_domain > 1 else samples
            clients += [np.sort(part) for part in np.array_split(order, per_domain)]
    test = np.flatnonzero((domains.of == target) & (listed | (domains.test is None)))
    if not len(test):
        raise ValueError(f"the domain {domains.names[target]} has no images to test on")
    scheme = f"leave-out:{domains.names[target]}" + (f",{per_domain}" if per_domain > 1 else "")
    return Split(scheme, clients, len(domains.of), test=test)


def from_callable(labels: Indices, clients: int, seed: int, make: Callable[..., Any], scheme: str) -> Split:
    """A user's `make(labels, clients, seed)`, which returns the sample numbers of every client."""
    if not callable(make):
        raise ValueError(f"split {scheme}: expected a callable(labels, clients, seed), got {make!r}")
    made = make(labels, clients, seed)
    if not isinstance(made, Iterable):
        raise ValueError(f"split {scheme}: must return a list of sample numbers per client, got {made!r}")
    parts = [np.asarray(part).reshape(-1) for part in made]
    if not parts:
        raise ValueError(f"split {scheme}: returned no clients")
    for i, part in enumerate(parts):
        where = f"split {scheme}: client {i}"
        if len(part) == 0:
            raise ValueError(f"{where} has no samples")
        if not np.issubdtype(part.dtype, np.integer):
            raise ValueError(f"{where} must have whole sample numbers, got {part.dtype}")
        for wrong in part[(part < 0) | (part >= len(labels))]:
            raise ValueError(f"{where} has sample {wrong}, outside 0 to {len(labels) - 1}")
    return Split(scheme, [part.astype(np.int64) for part in parts], len(labels))


def _proportions(rng: np.random.Generator, beta: float, over: int, times: int) -> NDArray[np.float64]:
    """Rows that sum to one. A sample so concentrated that it underflows is the limit: all mass on one entry."""
    drawn = rng.dirichlet(np.full(over, beta), times) if over > 1 else np.ones((times, 1))
    total = drawn.sum(1)
    for row in np.flatnonzero(~(np.isfinite(total) & (total > 0))):
        drawn[row] = np.eye(over)[rng.integers(over)]
    return np.asarray(drawn / drawn.sum(1, keepdims=True))


def _within_supply(size: int, proportions: NDArray[np.float64], supply: Counts, rng: np.random.Generator) -> Counts:
    """How many samples of each class each client gets: as drawn while there are some, all clients served at once.

    Every turn either fills all clients or uses up a class, so it ends.
    """
    counts = np.zeros(proportions.shape, dtype=np.int64)
    left = supply.astype(np.int64)
    while len(open_ := np.flatnonzero(missing := size - counts.sum(1))):
        wish = proportions[open_] * (left > 0)
        wish[wish.sum(1) < 1e-12] = left
        wanted = rng.multinomial(missing[open_], wish / wish.sum(1, keepdims=True))
        for c in np.flatnonzero(wanted.sum(0) > left):
            wanted[:, c] = rng.multivariate_hypergeometric(wanted[:, c], left[c], method="marginals")
        counts[open_] += wanted
        left -= wanted.sum(0)
    return counts


def _deal(labels: Indices, counts: Counts, rng: np.random.Generator) -> list[Indices]:
    """Assign each class's samples in a random order, `counts` (clients x classes) of them.

    A class that is used up is shuffled and started again; no sample is assigned twice before.
    """
    decks = []
    for c, wanted in enumerate(counts.sum(0)):
        samples = np.flatnonzero(labels == c)
        turns = -(-int(wanted) // max(1, len(samples)))
        decks.append(np.concatenate([rng.permutation(samples) for _ in range(max(1, turns))]))
    ends = np.cumsum(counts, axis=0)
    return [
        np.concatenate([deck[end - count : end] for deck, end, count in zip(decks, ends[i], counts[i], strict=True)])
        for i in range(len(counts))
    ]

"""The active clients one after the other, in this process."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedlesam.algorithms import Algorithm
from fedlesam.core import disk
from fedlesam.core.batches import Batches, ClientData, size_of
from fedlesam.core.buffers import Unsupported
from fedlesam.core.checks import NotFinite
from fedlesam.core.client import drain, local_update
from fedlesam.core.computing import compute_context
from fedlesam.core.disk import FileDigest, check_digest
from fedlesam.core.evaluation import BatchScore, Evaluation, combine, score_batches
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.core.reduction import Reduction
from fedlesam.engines.signals import StopFlag
from fedlesam.engines.store import Store, client_file
from fedlesam.engines.world import WorkerLost

LONGEST_REASON = 200
"""Characters of an error kept in a record."""

NOT_THE_CLIENTS = (WorkerLost, MemoryError, torch.OutOfMemoryError, Unsupported)
"""What the machine or the model does wrong: to leave a client out for it would make the results a matter of luck."""


def is_the_clients(error: Exception) -> bool:
    """Whether a client may be left out for it. Out of RAM, PyTorch raises no class of its own."""
    return not isinstance(error, NOT_THE_CLIENTS) and "can't allocate memory" not in str(error)


def reason(error: Exception) -> str:
    """As a record tells it."""
    what = error.what if isinstance(error, NotFinite) else f"{type(error).__name__}: {error}"
    return what.splitlines()[0][:LONGEST_REASON]


@dataclass
class Outcome:
    """The answers of a round, summed, and what they cost."""

    reduction: Reduction
    dropped: dict[int, str] = field(default_factory=dict)
    """Clients that failed, and why."""
    backward_passes: int = 0
    bytes_up: int = 0


@dataclass(frozen=True)
class Saved:
    """Memories put into a folder."""

    rounds: dict[int, int]
    """client -> the round its memory is of."""
    digests: dict[str, FileDigest]
    """Of the files that are new there."""


def without_file(rounds: Mapping[int, int], digests: Mapping[str, FileDigest]) -> set[int]:
    """The clients with nothing to remember."""
    return {client for client, round in rounds.items() if client_file(round, client) not in digests}


@dataclass
class SerialEngine:
    """Trains clients, and holds their new memories back until the round is committed."""

    model: FlatModel
    clients: Sequence[ClientData]
    algorithm: Algorithm
    local: LocalTraining
    seed: int
    threads: int | None
    by_examples: bool
    test: Batches | None
    store: Store
    halt: StopFlag
    drop: bool = False
    """Leave clients out that fail; or else stop at the first."""
    max_norm: float | None = None
    """Of an update; a larger one is a failure."""

    def __post_init__(self) -> None:
        self.sent: Broadcast | None = None
        self.pending: dict[int, Memory | None] = {}
        self.dropped: dict[int, str] = {}
        self.training = 0
        """The client being trained, whose an error is."""

    def train(self, sent: Broadcast, chosen: Sequence[int]) -> Outcome:
        return self.train_here(sent, chosen, chosen, self.halt.check)

    def train_here(
        self, sent: Broadcast, chosen: Sequence[int], everyone: Sequence[int], before_step: Callable[[], None]
    ) -> Outcome:
        """Train those of the round's clients that are this process's."""
        self.sent, self.pending, self.dropped = sent, {}, {}
        outcome, passes = Outcome(self.reduction(sent, everyone), self.dropped), self.model.backward_passes
        with compute_context(self.threads, self.model.device):
            for answer in self.accepted(sent, chosen, outcome.reduction, before_step):
                outcome.bytes_up += answer.nbytes
                kept = self.store.prepare(sent.round, answer.client, answer.memory, sent.weights)
                self.pending[answer.client] = kept
            self.store.make_room(sent.round, sent.weights, self.pending)
        outcome.backward_passes = self.model.backward_passes - passes
        return outcome

    def accepted(
        self, sent: Broadcast, chosen: Sequence[int], into: Reduction, before_step: Callable[[], None]
    ) -> Iterator[ClientResult]:
        """The answers that are part of the round, added up; of the others `dropped` says why."""
        for answer in self.answers(sent, chosen, before_step):
            try:
                into.add(answer)
            except NotFinite as error:
                self.drop_client(answer.client, error)
            else:
                yield answer

    def reduction(self, sent: Broadcast, everyone: Sequence[int]) -> Reduction:
        weight = sum(size_of(self.clients[client]) for client in everyone) if self.by_examples else len(everyone)
        return Reduction(
            sent.round, max(1, weight), by_examples=self.by_examples, max_norm=self.max_norm, buffers=sent.buffers
        )

    def answers(
        self, sent: Broadcast, chosen: Sequence[int], before_step: Callable[[], None]
    ) -> Iterator[ClientResult]:
        """Of those that do not fail, in any order."""
        for client in chosen:
            self.training = client
            memory = self.store.get(client, Memory()).to(self.model.device)
            data, rules, local = self.clients[client], self.algorithm, self.local
            steps = local_update(self.model, data, rules, local, sent, memory, client=client, seed=self.seed)
            try:
                answer = drain(steps, before_step)
            except Exception as error:
                error.add_note(f"while training client {client} in round {sent.round}")
                self.drop_client(client, error)
            else:
                yield answer

    def drop_client(self, client: int, error: Exception) -> None:
        """Note why a client is not part of the round, or stop where that was asked for."""
        if not (self.drop and is_the_clients(error)):
            raise error
        self.dropped[client] = reason(error)

    def evaluate(self, state: Broadcast) -> Evaluation | None:
        return combine(self.score_here(state, 0, 1)) if self.test is not None else None

    def score_here(self, state: Broadcast, part: int, parts: int) -> list[BatchScore]:
        """Every `parts`-th batch of the test set, from number `part` on."""
        assert self.test is not None
        with compute_context(self.threads, self.model.device):
            self.model.load(state.weights, state.buffers)
            return score_batches(self.model, self.test, self.local.loss, part, parts, self.halt.check)

    def commit(self) -> None:
        """Make the memories of the last trained round current."""
        if self.sent is not None:
            self.store.commit(self.sent.round, self.sent.weights, self.pending)
        self.pending = {}

    def save(self, folder: Path, known: Collection[str]) -> Saved:
        """Put all memories into a folder, lastingly."""
        return Saved(dict(self.store.rounds), self.store.save(folder, known))

    def adopt(self, folder: Path, rounds: Mapping[int, int], digests: Mapping[str, FileDigest]) -> None:
        """Begin with memories from a folder, once they are known to be what was saved."""
        for name, seal in digests.items():
            check_digest(folder / name, seal)
        self.store.adopt(folder, rounds, without_file(rounds, digests))

    def collect(self, folder: Path, named: Collection[str]) -> None:
        """Delete from a folder what is not named."""
        disk.collect(folder, named)

    def close(self) -> None:
        """Nothing to stop."""

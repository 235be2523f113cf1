"""The active clients one after the other, in this process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fedlesam import seeds
from fedlesam.algorithms import Algorithm
from fedlesam.client import finish, local_update
from fedlesam.data.batches import Batches, ClientData
from fedlesam.evaluation import BatchScore, Evaluation, combine, score_batches
from fedlesam.local import LocalTraining
from fedlesam.messages import Answer, Broadcast, Memory
from fedlesam.models.flat import FlatModel
from fedlesam.reduction import Reduction
from fedlesam.store import Store


@dataclass
class Outcome:
    """The answers of a round, summed, and what they cost."""

    reduction: Reduction
    backward_passes: int = 0
    bytes_up: int = 0


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

    def __post_init__(self) -> None:
        self.sent: Broadcast | None = None
        self.pending: dict[int, Memory | None] = {}
        self.training = 0
        """The client being trained, whose an error is."""

    def train(self, sent: Broadcast, chosen: Sequence[int]) -> Outcome:
        return self.train_here(sent, chosen)

    def train_here(
        self, sent: Broadcast, chosen: Sequence[int], before_step: Callable[[], None] | None = None
    ) -> Outcome:
        self.sent, self.pending = sent, {}
        outcome, passes = Outcome(Reduction(sent.round, self.by_examples)), self.model.backward_passes
        with self.settings():
            for answer in self.answers(sent, chosen, before_step):
                outcome.reduction.add(answer)
                outcome.bytes_up += answer.nbytes
                kept = self.store.prepare(sent.round, answer.client, answer.memory, sent.weights)
                self.pending[answer.client] = kept
            self.store.make_room(sent.round, sent.weights, self.pending)
        outcome.backward_passes = self.model.backward_passes - passes
        return outcome

    def answers(
        self, sent: Broadcast, chosen: Sequence[int], before_step: Callable[[], None] | None
    ) -> Iterator[Answer]:
        for client in chosen:
            self.training = client
            memory, data = self.store.get(client, Memory()), self.clients[client]
            rules, local = self.algorithm, self.local
            steps = local_update(self.model, data, rules, local, sent, memory, client=client, seed=self.seed)
            try:
                yield finish(steps, before_step)
            except Exception as error:
                error.add_note(f"while training client {client} in round {sent.round}")
                raise

    def evaluate(self, state: Broadcast) -> Evaluation | None:
        return combine(self.score_here(state, 0, 1)) if self.test is not None else None

    def score_here(self, state: Broadcast, part: int, parts: int) -> list[BatchScore]:
        """Every `parts`-th batch of the test set, from number `part` on."""
        assert self.test is not None
        with self.settings():
            self.model.load(state.weights, state.buffers)
            return score_batches(self.model, self.test, self.local.loss, part, parts)

    def commit(self) -> None:
        """Make the memories of the last trained round current."""
        if self.sent is not None:
            self.store.commit(self.sent.round, self.sent.weights, self.pending)
        self.pending = {}

    def close(self) -> None:
        """Nothing to stop."""

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """This run's threads, and the caller's random numbers left alone."""
        before = torch.get_num_threads()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            with seeds.untouched(self.model.device):
                yield
        finally:
            if self.threads is not None:
                torch.set_num_threads(before)

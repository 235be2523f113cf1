"""The active clients one after the other, in this process."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedlesam.algorithms import Algorithm
from fedlesam.core import disk
from fedlesam.core.batches import Batches, ClientData, size_of
from fedlesam.core.client import drain, local_update
from fedlesam.core.client_tests import ClientScore, ClientTests, over_clients, score_clients
from fedlesam.core.computing import compute_context
from fedlesam.core.drawn import known_size
from fedlesam.core.evaluation import BatchScore, Evaluation, combine, score_batches, take_few
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, ClientResult, Memory, Results
from fedlesam.core.reduction import Reduction
from fedlesam.core.task import Task
from fedlesam.engines.base import Engine, Outcome, Saved, is_client_error, reason
from fedlesam.engines.host import HostMemory
from fedlesam.engines.segments import segment_file
from fedlesam.engines.signals import StopFlag
from fedlesam.engines.store import Store

log = logging.getLogger("fedlesam")


@dataclass
class SerialEngine(Engine):
    """Trains clients in this process.

    Args:
        model: the module that all clients are trained with.
        clients: the data of every client.
        algorithm: the method.
        local: how clients train.
        seed: of the run.
        threads: to compute with; None leaves the process's own number.
        by_examples: whether clients are weighted by their number of samples.
        test: the test data.
        store: the client states.
        stop_flag: checked before every local step.
        drop: whether a client that fails is dropped from the round; else its error is raised.
        max_norm: of an update; a client with a larger one fails.
        task: how a batch becomes a loss, and what is measured.
        client_tests: the test samples of every client.
    """

    model: FlatModel
    clients: Sequence[ClientData]
    algorithm: Algorithm
    local: LocalTraining
    seed: int
    threads: int | None
    by_examples: bool
    test: Batches | None
    store: Store
    stop_flag: StopFlag
    drop: bool = False
    max_norm: float | None = None
    task: Task = field(default_factory=Task.classification)
    client_tests: ClientTests | None = None

    def __post_init__(self) -> None:
        self.broadcast: Broadcast | None = None
        self.host: HostMemory | None = None
        self.pending: dict[int, Memory | None] = {}
        """The new client states of a round that is not committed; None: it is in the store's folder."""
        self.dropped: dict[int, str] = {}
        self.training = 0
        """The client being trained, to which an error belongs."""
        self.waited = 0.0
        """Seconds of the round that were spent on other federations."""

    def train(self, broadcast: Broadcast, active: Sequence[int]) -> Outcome:
        return self.train_share(broadcast, active, active, self.stop_flag.check)

    def train_share(
        self, broadcast: Broadcast, share: Sequence[int], active: Sequence[int], before_step: Callable[[], None]
    ) -> Outcome:
        """Train a share of the round's clients.

        Args:
            broadcast: what the server sends to each of them.
            share: the clients to train here.
            active: all clients of the round, over all processes.
            before_step: called before every local step; it may raise.
        """
        self.broadcast, self.pending, self.dropped, self.waited = broadcast, {}, {}, 0.0
        self.host = host = HostMemory(broadcast.weights)
        outcome, passes = Outcome(self.reduction(broadcast, active), self.dropped), self.model.backward_passes
        with self.computing():
            for result in self.accepted(broadcast, share, outcome.reduction, before_step):
                outcome.bytes_up += result.nbytes
                client, memory = result.client, host.keep(result.memory)
                self.pending[client] = self.store.prepare(broadcast.round, client, memory, host.anchor)
                del result, memory  # before the next client trains
            self.store.make_room(broadcast.round, host.anchor, self.pending)
        outcome.backward_passes, outcome.waited = self.model.backward_passes - passes, self.waited
        return outcome

    def accepted(
        self, broadcast: Broadcast, share: Sequence[int], into: Reduction, before_step: Callable[[], None]
    ) -> Iterator[ClientResult]:
        """Train clients and add their results up; `dropped` has the reason of each that is not accepted.

        Args:
            broadcast: what the server sends to each of them.
            share: the clients to train here.
            into: the sums.
            before_step: called before every local step; it may raise.
        """
        for group in self.results(broadcast, share, before_step):
            for result, refused in zip(group.clients, into.add_many(group), strict=True):
                if refused is None:
                    yield result
                else:
                    self._drop_client(result.client, refused)
                del result
            del group

    def computing(self) -> AbstractContextManager[None]:
        """The process while this engine computes."""
        return compute_context(self.threads, self.model.device, self.model.precision)

    def reduction(self, broadcast: Broadcast, active: Sequence[int]) -> Reduction:
        """An empty reduction for a round.

        Args:
            broadcast: what the server sends.
            active: all clients of the round.
        """
        weight = sum(self._size(client) for client in active) if self.by_examples else len(active)
        return Reduction(broadcast.round, max(1, weight), self.by_examples, self.max_norm, broadcast.buffers)

    def results(self, broadcast: Broadcast, share: Sequence[int], before_step: Callable[[], None]) -> Iterator[Results]:
        """The results of the clients that do not fail, in any order, in groups that are added up at once.

        Args:
            broadcast: what the server sends to each of them.
            share: the clients to train here.
            before_step: called before every local step; it may raise.
        """
        for client in share:
            self.training = client
            memory = self.store.get(client, Memory()).to(self.model.device)
            rules, local, own = self.algorithm, self.local, {"client": client, "seed": self.seed}
            try:
                data = self.clients[client]  # may be made, and refused, only now
                steps = local_update(self.model, data, rules, local, broadcast, memory, **own, task=self.task)
                result = drain(steps, before_step)
            except Exception as error:
                error.add_note(f"while training client {client} in round {broadcast.round}")
                self._drop_client(client, error)
            else:
                yield Results([result])
                del result, steps

    def _size(self, client: int) -> int:
        """Samples of a client; 0 of one that cannot be made, which fails when it trains."""
        known = known_size(self.clients, client)
        if known is not None:
            return known
        try:
            return size_of(self.clients[client])
        except Exception as error:
            if not (self.drop and is_client_error(error)):
                raise
            return 0

    def _drop_client(self, client: int, error: Exception) -> None:
        if not (self.drop and is_client_error(error)):
            raise error
        self.dropped[client] = reason(error)
        log.debug("client %d is dropped", client, exc_info=error)

    def metrics_fit(self, broadcast: Broadcast) -> bool:
        """Whether the metrics take a few test samples; if not, only an evaluation tells whether they are wrong.

        Args:
            broadcast: the global model.
        """
        tests, measured = self.client_tests, self.task.measured
        if not measured or (self.test is None and tests is None):
            return True
        if tests is not None and any(metric.finish is None for metric in measured.values()):
            return False  # they are called for every client, and may not take those of one
        with compute_context(self.threads, self.model.device, self.model.precision):
            self.model.load(broadcast.weights, broadcast.buffers)
            few = self.test or (tests.first(self.model.device) if tests is not None else None)
            return few is None or take_few(self.model, few, self.task)

    def evaluate(self, broadcast: Broadcast) -> Evaluation | None:
        return self.combined(*self.score_share(broadcast, 0, 1))

    def score_share(self, broadcast: Broadcast, part: int, parts: int) -> tuple[list[BatchScore], list[ClientScore]]:
        """Score every `parts`-th batch of the test data, and of the clients' own.

        Args:
            broadcast: the global model.
            part: the number of the first batch.
            parts: the number of processes.
        """
        how = part, parts, self.stop_flag.check
        if self.test is None and self.client_tests is None:
            return [], []
        with self.computing():
            self.model.load(broadcast.weights, broadcast.buffers)
            test = [] if self.test is None else score_batches(self.model, self.test, self.task, *how)
            if self.client_tests is None:
                return test, []
            return test, score_clients(self.model, self.client_tests, self.task, *how)

    def combined(self, test: list[BatchScore], clients: list[ClientScore]) -> Evaluation | None:
        """The evaluation of scores of all processes; without a test set, on all samples of the clients together.

        Args:
            test: of the test data.
            clients: of the clients' own.
        """
        if not test and self.client_tests is None:
            return None
        with self.computing():
            if self.client_tests is None:
                return combine(test, self.task)
            whole = test or [score.as_batch(i) for i, score in enumerate(sorted(clients, key=lambda one: one.number))]
            return replace(combine(whole, self.task), clients=over_clients(clients, self.task, len(self.clients)))

    def commit(self) -> None:
        if self.broadcast is not None and self.host is not None:
            self.store.commit(self.broadcast.round, self.host.anchor, self.pending)
        self.broadcast, self.host, self.pending = None, None, {}

    def save(self, folder: Path, round: int, known: Mapping[str, disk.FileDigest], part: int = 0) -> Saved:
        """Write what changed of this process's client states to a folder, so that they survive a power loss.

        Args:
            folder: where the files go.
            round: rounds done.
            known: the files of the last checkpoint there; what is in them is not written again.
            part: the number of this process, which is part of the file's name.
        """
        return Saved(self.store.save(folder, segment_file(round, part), known))

    def load_states(self, folder: Path, saved: Saved) -> None:
        for name, digest in saved.digests.items():
            disk.check_digest(folder / name, digest)
        if saved.rounds is None:
            self.store.load(folder, saved.digests)
        else:
            self.store.load_files(folder, saved.rounds, saved.empty)

    def collect(self, folder: Path, named: Collection[str]) -> None:
        disk.collect(folder, named)

    def close(self) -> None:
        pass

"""The round loop, and the class most people use."""

import copy
import dataclasses
import functools
import signal
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from fedlesam import algorithms
from fedlesam.algorithms import Algorithm
from fedlesam.core import evaluation
from fedlesam.core.batches import Batches, ClientData
from fedlesam.core.checks import belongs_to, check_choice, check_count, check_kind
from fedlesam.core.choices import Weighting
from fedlesam.core.client_tests import ClientTests, Tests
from fedlesam.core.computing import return_freed_memory
from fedlesam.core.disk import FileDigest
from fedlesam.core.drawn import DrawnClients, check_clients, is_checked_whole
from fedlesam.core.evaluation import Evaluation, PerClient
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.history import History, Overview
from fedlesam.core.hold_out import given_tests
from fedlesam.core.local import LocalTraining
from fedlesam.core.module_check import check_module, check_values, copied
from fedlesam.core.record import DROPOUT as DROPOUT
from fedlesam.core.record import Record as Record
from fedlesam.core.record import log_failed
from fedlesam.core.sampling import Sampling, check_active, draw, draw_silent
from fedlesam.core.sampling import count_active as count_active
from fedlesam.core.server import ServerState, server_step
from fedlesam.core.shell import Shell
from fedlesam.core.sound import check_outputs, check_samples, named_tests
from fedlesam.core.task import Task
from fedlesam.engines.base import Engine, Saved
from fedlesam.engines.distributed import DistributedEngine, worker_loop
from fedlesam.engines.serial import SerialEngine
from fedlesam.engines.settings import Execution, FailurePolicy, find_device
from fedlesam.engines.signals import Interrupted, StopFlag
from fedlesam.engines.stack import Stack
from fedlesam.engines.stacked import CHANGES, NotStackable, StackedEngine, check_stackable
from fedlesam.engines.world import WorkerLost, World, start_local


class Federation:
    """A global model, its clients and a method; `round()` trains one communication round.

    The same seed and number of threads give the same bits, whatever the number of workers.

    Args:
        model: any nn.Module. Its weights are the first global model; it is copied, not changed.
        clients: their data, each a pair of tensors (x, y), a dict or nested tuple of tensors, or a torch Dataset. Of
            more than 10,000, or of a sequence that makes its items, each is checked when it is drawn.
        algorithm: a name of the catalogue, or an Algorithm such as `fl.algorithms.fedsam(rho=0.1)`.
        local: how a client trains.
        task: how a batch becomes a loss, and what is measured; by default classification, with the loss of `local`.
        active: the clients of a round, a count (int) or a share (float) of them.
        sampling: draws the clients of a round; a function of (round, rng, clients, active) that returns their numbers
            and draws from the NumPy generator it is given, which derives from (seed, round). By default uniform.
        test: data on which the global model is evaluated.
        test_clients: every client's own test samples, in any form its data may have, None for a client without; or a
            share of its samples, drawn by seed, on which it never trains. The metrics over clients are in the records.
            Without `test`, all of these samples together are the test data.
        seed: all random numbers derive from it.
        weighting: "clients" averages updates over clients, "examples" weights clients by their number of samples.
        evaluate_every: rounds between two evaluations. The last round of `run` is always evaluated.
        per_client: also report the test accuracy on every client's own mixture of classes.
        failures: what happens when a client fails.
        execution: how rounds are computed: workers, threads, device, memory.

    Arguments of the methods:
        round: from 0; one that is done, or one to come.
        active: the clients of a round, by number.
        folder: of a checkpoint.
        known: the files of the last checkpoint there, by name; what is in them is not written again.
        named: the files to keep.
        state: the global model and the rules' state.
        saved: the files of the memories that belong to it.
        signum: the signal that Interrupted names.
    """

    @belongs_to(local=LocalTraining, failures=FailurePolicy, execution=Execution)
    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[ClientData],
        algorithm: str | Algorithm = "fedavg",
        local: LocalTraining | None = None,
        *,
        task: Task | None = None,
        active: int | float = 1.0,
        sampling: Sampling | None = None,
        test: ClientData | None = None,
        test_clients: Tests | float | None = None,
        seed: int = 0,
        weighting: Weighting = "clients",
        evaluate_every: int = 1,
        per_client: bool = False,
        failures: FailurePolicy | None = None,
        execution: Execution | None = None,
        _world: World | None = None,
        _stack: Stack | None = None,
    ) -> None:
        self.name = algorithm if isinstance(algorithm, str) else None
        self.algorithm = algorithms.get(algorithm) if isinstance(algorithm, str) else algorithm
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(f"algorithm must be a name or an Algorithm, got {algorithm!r}; e.g. algorithms.fedsam()")
        check_kind("local", local, LocalTraining)
        check_kind("task", task, Task)
        check_kind("failures", failures, FailurePolicy)
        check_kind("execution", execution, Execution)
        self.failures, self.execution = failures or FailurePolicy(), execution or Execution()
        check_count("Federation", "seed", seed, at_least=0)
        check_count("Federation", "evaluate_every", evaluate_every)
        check_choice("Federation", "weighting", weighting, get_args(Weighting))
        if weighting == "examples" and self.algorithm.uniform_rules:
            raise ValueError(
                f"weighting by examples does not work with {', '.join(self.algorithm.uniform_rules)}: "
                'the server state of these rules is a plain mean over clients; use weighting="clients"'
            )
        self._world, how = _world, self.execution
        self.workers = how.workers if _world is None else _world.size
        self.threads = 1 if how.threads is None and self.workers > 1 else how.threads
        stacked = how.engine == "stacked" or how.stack_runs is not None
        if stacked:
            check_stackable(self.workers, how.stack_runs, self.threads)
        check_clients(clients)
        clients, tests = given_tests(clients, test_clients, seed)
        whole = is_checked_whole(clients)
        seen = clients if whole else {0: clients[0]}
        all_tests = whole and tests is not None and is_checked_whole(tests)
        named = named_tests(test, tests, all_tests)
        check_samples(seen, named, drop=self.failures.drops)
        self.clients, self.local, self.seed = clients, local or LocalTraining(), int(seed)
        self.local.check(self.algorithm)
        self.task = self.local.task(task)
        self.active, self.weighting = count_active(active, len(clients)), weighting
        self.sampling, self.test_data, self.test_clients = sampling, test, tests
        self.first_model: str | None = None
        """The fingerprint of the model that was given, once it was asked for."""
        self.evaluate_every = int(evaluate_every)
        self.history = History()
        self._logged, self._tried = 0, False

        check_module(model)  # a lazy one cannot even be copied
        check_values(model)
        module = copied(model) if how.device is None else copied(model).to(find_device(how.device))
        graphs = how.cuda_graphs and not (stacked or how.compile)
        reorder = not stacked and not any(rule.requires_order for rule in self.algorithm.rules)
        self._flat = FlatModel(copy.deepcopy(module), how.precision, how.compile and not stacked, graphs, reorder)
        if _world is None:
            how.check_fork(self._flat.device)
        self._shell = Shell(module)
        return_freed_memory()
        self.algorithm = self.algorithm.for_model(self._flat.tensors)
        buffers, private = self._flat.buffers(), self.algorithm.privacy is not None
        outputs, changed, fits = check_outputs(self._flat, seen, named, self.task, stacked=stacked or private)
        if stacked and changed:
            raise NotStackable(CHANGES.format(", ".join(changed)))
        if self.algorithm.privacy is not None:
            self.algorithm.privacy.check_buffers(changed)
        self._mixtures = evaluation.mixtures(clients, self.task, outputs) if per_client else None
        self.state = ServerState.initial(self.algorithm, self._flat.plain_weights(), buffers)
        self._pinned, self._begun, self._drawn = how.store == "pinned", False, True
        self.memories = how.make_store(self, self.workers, empty=_world is None)
        if _stack is None and how.stack_runs is not None:
            _stack = Stack(how.stack_runs, how.compile)
        engine = functools.partial(StackedEngine, compile_step=how.compile, stack=_stack) if stacked else SerialEngine
        self._local_engine = engine(
            model=self._flat,
            clients=clients if whole else DrawnClients(clients, seen[0], self.failures.drops, fits),
            algorithm=self.algorithm,
            local=self.local,
            seed=self.seed,
            threads=self.threads,
            by_examples=weighting == "examples",
            test=Batches(test, self._flat.device, self.task.collate) if test is not None else None,
            store=self.memories,
            stop_flag=StopFlag(),
            drop=self.failures.drops,
            max_norm=self.failures.max_update_norm,
            task=self.task,
            client_tests=None if tests is None else ClientTests(tests, self.task.collate, None if all_tests else fits),
        )
        self._engine: Engine | None = self._local_engine if self.workers == 1 else None

    def __repr__(self) -> str:
        return repr(self._overview)

    def _repr_html_(self) -> str:
        return self._overview.html()

    @property
    def _overview(self) -> Overview:
        sizes = len(self.clients), self.active, self.state.weights.numel(), self.state.round
        return Overview(self.name, repr(self.algorithm), *sizes, repr(self.local), self.history)

    @property
    def weights(self) -> Tensor:
        """The trainable parameters of the global model as one flat vector, in `model.parameters()` order."""
        return self.state.weights.clone()

    @property
    def model(self) -> nn.Module:
        """A copy of the global model of now, in eval mode, ready to use or save; what is done to it stays with it."""
        return self._shell.filled(self._flat.views(self.state.weights), self.state.buffers)

    @property
    def tested(self) -> bool:
        """Whether there are data on which the global model is evaluated."""
        return self.test_data is not None or self.test_clients is not None

    @property
    def knows_memories(self) -> bool:
        """Whether this process can read what every client remembers; a pinned store leaves it with the workers."""
        return not (self._pinned and self.workers > 1)

    def replica(self) -> FlatModel:
        """A copy of the global model for somebody who trains beside the federation: its precision, not compiled."""
        return FlatModel(self.model, self._flat.precision, reorder=self._flat.order is not None)

    def understudy(self) -> SerialEngine:
        """An engine that trains beside the federation by the same rules, on a replica; its memories are only read."""
        return dataclasses.replace(self._local_engine, model=self.replica(), test=None, client_tests=None)

    @property
    def joins_last(self) -> bool:
        """Whether a last batch of one sample joins the one before, as BatchNorm needs."""
        return self._flat.batch_norm

    def draw_active(self, round: int) -> list[int]:
        """The active clients of a round in their order: uniform without replacement, or by `sampling`."""
        return draw(self.seed, round, len(self.clients), self.active, self.sampling)

    def draw_silent(self, round: int, active: Sequence[int]) -> list[int]:
        """Those of the active clients that will never answer, each by its own draw."""
        return draw_silent(self.seed, round, active, self.failures.dropout)

    def round(self, active: Sequence[int] | None = None, *, evaluate: bool | None = None) -> Record:
        """One communication round. On any error nothing has changed.

        Args:
            active: the numbers of its clients; None draws them.
            evaluate: whether the new model is evaluated; None leaves it to `evaluate_every`.
        """
        chosen = self.draw_active(self.state.round) if active is None else check_active(active, len(self.clients))
        silent, lr = self.draw_silent(self.state.round, chosen), self.local.lr_at(self.state.round, self.algorithm)
        engine, sent = self._start(), self.state.sent(self.algorithm)
        try:
            if evaluate is not False:
                self._try_metrics(engine)
            began = time.perf_counter()
            outcome = engine.train(sent, [client for client in chosen if client not in silent])
            asked, reduction, self._drawn = len(chosen), outcome.reduction, self._drawn and active is None
            state = server_step(self.algorithm, self.state, reduction, len(self.clients), asked, self.seed)
            seconds = time.perf_counter() - began - outcome.waited
            due = state.round % self.evaluate_every == 0 if evaluate is None else evaluate
            tested = engine.evaluate(state.broadcast()) if due else None
            record = Record(
                round=sent.round,
                active=chosen,
                train_loss=outcome.reduction.loss,
                test_loss=tested.loss if tested else None,
                test_accuracy=tested.accuracy if tested else None,
                metrics=tested.metrics if tested else {},
                smaller=tuple(name for name in (tested.metrics if tested else ()) if self.task.is_smaller(name)),
                lr=lr,
                seconds=seconds,
                backward_passes=outcome.backward_passes,
                bytes_down=sent.nbytes * len(chosen),
                bytes_up=outcome.bytes_up,
                divergence=outcome.reduction.divergence(state.weights, sent.weights),
                per_client=self._per_client(tested),
                test_clients=tested.clients if tested else {},
                epsilon=self._epsilon(state.round),
                dropped=dict(sorted({**dict.fromkeys(silent, DROPOUT), **outcome.dropped}.items())) or None,
            )
            engine.commit()
            self.state = state
            self.history.append(record)
            self._logged = log_failed(record, self._logged)
        except Interrupted:
            self._local_engine.stop_flag.clear()
            raise
        except (KeyboardInterrupt, WorkerLost):
            self._abandon()
            raise
        return record

    def run(self, rounds: int) -> Iterator[Record]:
        """Train more rounds, a record each; the model of the last one is always evaluated.

        Args:
            rounds: how many more.
        """
        check_count("run", "rounds", rounds)
        self.local.check(self.algorithm, self.state.round + rounds)
        for left in reversed(range(rounds)):
            yield self.round(evaluate=None if left else True)

    def fit(self, rounds: int, out: str | Path | None = None, **settings: Any) -> list[Record]:
        """Train up to so many rounds in total, show progress, and return the records of all of them.

        With `out` the run has a folder like those of the command line: checkpoints, a lock, a page by `fedlesam
        report`; the same call again resumes it. Without it nothing is written.

        Args:
            rounds: In total, with those already done.
            out: The run folder.
            **settings: Of `fedlesam.runs.fit.fit`: callbacks, stop_when, patience, name, overwrite, and more.
        """
        from fedlesam.runs.fit import fit  # the one door to a room above

        return fit(self, rounds, out, **settings)

    def request_stop(self, signum: int = signal.SIGINT) -> None:
        """Drop the round under way at its next step, from another thread: `round` raises Interrupted."""
        self._local_engine.stop_flag.request(signum)

    def check_stop(self) -> None:
        """Raise Interrupted for a request to stop that came too late for the last round."""
        self._local_engine.stop_flag.check()

    def save_memories(self, folder: Path, known: Mapping[str, FileDigest] | None = None) -> Saved:
        """Put what clients remember into a folder, lasting once it is synced."""
        if self._engine is None and self._pinned and self._begun:
            raise ValueError("the workers that held the clients' memories are gone: start the run again")
        return (self._engine or self._local_engine).save(folder, self.state.round, known or {})

    def collect_memories(self, folder: Path, named: Collection[str]) -> None:
        """Delete from a folder the memories that are not named."""
        (self._engine or self._local_engine).collect(folder, named)

    def restore(self, state: ServerState, folder: Path, saved: Saved) -> None:
        """Go on from a state and the memories saved with it; refuses files that are not what was saved."""
        if self._engine is None:
            self.memories.clear()
        self._start().load_states(folder, saved)
        self.state = state

    def worker_loop(self) -> None:
        """In a process that torchrun started beside the leader: work for it until it stops."""
        if self._world is None or self._world.rank == 0:
            raise ValueError("only the other processes are workers; the leader runs rounds")
        worker_loop(self._local_engine, pinned=self._pinned, world=self._world)

    def close(self) -> None:
        """End the worker processes; a round after it starts new ones."""
        if isinstance(self._engine, DistributedEngine):
            self._engine.close()
            self._engine = None

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Engine:
        if self._engine is None:
            if self._pinned and len(self.memories):
                raise ValueError("the workers that held the clients' memories are gone: start the run again")
            serve = functools.partial(worker_loop, self._local_engine, self._pinned)
            lost_after, device = self.execution.lost_after, self._flat.device
            world = self._world or start_local(self.workers, self.threads, serve, lost_after, device)
            weakref.finalize(self, world.close, kill=True)
            self._engine = DistributedEngine(self._local_engine, world, self._pinned)
            self._begun = True
        return self._engine

    def _try_metrics(self, engine: Engine) -> None:
        """What a metric raises is found before the first round, not after its work."""
        if not self._tried and not self._local_engine.metrics_fit(self.state.broadcast()):
            try:
                engine.evaluate(self.state.broadcast())
            except ValueError as error:
                raise ValueError(f"before round {self.state.round}, so nothing is lost: {error}") from error
        self._tried = True

    def _abandon(self) -> None:
        if isinstance(self._engine, DistributedEngine):
            self._engine.world.close(kill=True)
            self._engine = None

    def _epsilon(self, rounds: int) -> float | None:
        """What privacy has cost after so many rounds; only known where the clients of all of them were drawn."""
        privacy = self.algorithm.privacy if self._drawn else None
        return None if privacy is None else privacy.epsilon(len(self.clients), self.active, rounds)

    def _per_client(self, tested: Evaluation | None) -> PerClient | None:
        if tested is None or tested.by_class is None or self._mixtures is None:
            return None
        return evaluation.per_client(tested.by_class, self._mixtures)

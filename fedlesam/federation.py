"""The round loop, and the class most people use."""

import copy
import dataclasses
import functools
import math
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlesam import algorithms
from fedlesam.algorithms import Algorithm
from fedlesam.core import evaluation, seeds
from fedlesam.core.batches import Batches, ClientData, known_labels
from fedlesam.core.buffers import Buffers, Unsupported
from fedlesam.core.checks import check_choice, check_count, check_number
from fedlesam.core.evaluation import Evaluation, PerClient
from fedlesam.core.flat_model import FlatModel, Precision
from fedlesam.core.local import LocalTraining
from fedlesam.core.module_check import changed_buffers, check_module
from fedlesam.core.saving import separate
from fedlesam.core.server import ServerState, server_step
from fedlesam.core.sound import check_labels, check_samples, describe
from fedlesam.engines.distributed import DistributedEngine, worker_loop
from fedlesam.engines.serial import Saved, SerialEngine
from fedlesam.engines.signals import Interrupted, StopFlag
from fedlesam.engines.stacked import CHANGES, NotStackable, StackedEngine, check_stackable
from fedlesam.engines.store import Store
from fedlesam.engines.watch import LOST_AFTER, check_lost_after
from fedlesam.engines.world import WorkerLost, World, start_local

DROPOUT = "dropout"
"""The reason of a client that never answers because it was drawn to."""

MOST_THREADS = 1024
"""Beyond it the threads' own memory ends the process."""


@dataclass(frozen=True)
class Record:
    """What one round did; a line of metrics.jsonl."""

    round: int
    """From 0, as t in the learning rate lr * decay ** t."""
    active: list[int]
    train_loss: float
    """Mean over the clients that answered of the mean over their local steps; NaN if nobody did."""
    test_loss: float | None
    test_accuracy: float | None
    lr: float
    seconds: float
    """Training and aggregation; evaluation is not counted."""
    backward_passes: int
    bytes_down: int
    bytes_up: int
    divergence: float
    """Mean over the clients that answered of norm(v_i - w_next) ** 2; NaN if nobody did."""
    per_client: PerClient | None = None
    """Test accuracy on every client's own mixture of classes, when asked for and evaluated."""
    dropped: dict[int, str] | None = None
    """The active clients that are not part of the round, and why: dropout, an error, an update that exploded."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what was not measured, or is not a number JSON has, is left out."""
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if self.per_client is not None and not self.per_client.untested:
            known["per_client"].pop("untested")
        if self.dropped:
            known["dropped"] = {str(client): why for client, why in self.dropped.items()}
        return {k: v for k, v in known.items() if not (isinstance(v, float) and not math.isfinite(v))}


def count_active(active: int | float, clients: int) -> int:
    """How many clients a round has: an int is a count, a float a share of them."""
    if isinstance(active, bool) or not isinstance(active, int | float):
        raise ValueError(f"active must be a count (int) or a share (float), got {active!r}")
    if isinstance(active, int):
        if not 1 <= active <= clients:
            raise ValueError(f"active must be from 1 to the number of clients, {clients}, got {active}")
        return active
    if not 0 < active <= 1:
        raise ValueError(f"active as a share must be above 0 and at most 1, got {active}; a count is an int, e.g. 10")
    return max(1, round(float(active) * clients))


class Federation:
    """A global model, its clients and a method; `round()` trains one communication round.

    `model` is any nn.Module: its weights are the first global model, and it is copied, not changed. `clients` are
    pairs of tensors (x, y) or torch Datasets. `algorithm` is a name of the catalogue or an Algorithm. `active` is a
    count (int) or a share (float) of the clients. `weighting="examples"` weights clients by their number of samples.
    The same seed and number of threads give the same bits, whatever the number of workers.

    `workers` processes train the active clients side by side, on one thread each unless `threads` says otherwise; end
    them with `close()`, or use the federation in a `with` block. One that is stopped by a signal for `lost_after`
    seconds ends the round with an error; 0 waits for ever. `memory` is how many bytes of clients' memory stay in
    RAM; the rest goes to `folder`. With several workers it lies in `folder`, where all of them see it, or stays with
    the worker that trained the client (`store="pinned"`). `precision="bf16"` runs forward passes under autocast, and
    `compile` puts the model through torch.compile. `engine="stacked"` trains the clients of a small model as one
    batched computation, with the same results to rounding, on one worker and not compiled.

    `dropout` is the probability that an active client never answers. A client that raises, whose numbers are not finite
    or whose update has a norm above `max_update_norm` raises here; with `on_client_error="drop"` it is left out of the
    round instead, keeps its memory, and the record says why.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[ClientData],
        algorithm: str | Algorithm = "fedavg",
        local: LocalTraining | None = None,
        active: int | float = 1.0,
        test: ClientData | None = None,
        seed: int = 0,
        threads: int | None = None,
        *,
        weighting: Literal["clients", "examples"] = "clients",
        evaluate_every: int = 1,
        per_client: bool = False,
        dropout: float = 0.0,
        max_update_norm: float | None = None,
        on_client_error: Literal["drop", "stop"] = "stop",
        precision: Precision = "fp32",
        compile: bool = False,
        engine: Literal["plain", "stacked"] = "plain",
        workers: int = 1,
        memory: int | None = None,
        store: Literal["shared", "pinned"] = "shared",
        folder: Path | None = None,
        lost_after: float = LOST_AFTER,
        world: World | None = None,
    ) -> None:
        self.algorithm = algorithms.get(algorithm) if isinstance(algorithm, str) else algorithm
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(f"algorithm must be a name or an Algorithm, got {algorithm!r}")
        check_count("Federation", "seed", seed, at_least=0)
        check_count("Federation", "evaluate_every", evaluate_every)
        check_count("Federation", "workers", workers)
        self.lost_after = check_lost_after("Federation", lost_after)
        check_choice("Federation", "weighting", weighting, ("clients", "examples"))
        check_choice("Federation", "store", store, ("shared", "pinned"))
        check_choice("Federation", "engine", engine, ("plain", "stacked"))
        check_choice("Federation", "precision", precision, ("fp32", "bf16"))
        check_choice("Federation", "on_client_error", on_client_error, ("drop", "stop"))
        check_number("Federation", "dropout", dropout, at_least=0)
        if dropout > 1:
            raise ValueError(f"Federation: dropout is a probability, from 0 to 1, got {dropout}")
        if max_update_norm is not None:
            check_number("Federation", "max_update_norm", max_update_norm, above=0)
        if threads is not None:
            check_count("Federation", "threads", threads)
            if threads > MOST_THREADS:
                raise ValueError(f"Federation: threads must be at most {MOST_THREADS}, got {threads}")
        if memory is not None:
            check_count("Federation", "memory", memory, at_least=0)
        if weighting == "examples" and self.algorithm.uniform_rules:
            raise ValueError(
                f"weighting by examples does not work with {', '.join(self.algorithm.uniform_rules)}: "
                'the server state of these rules is a plain mean over clients; use weighting="clients"'
            )
        if compile and workers > 1 and world is None:
            raise ValueError(
                "compile does not go with several workers of one process: PyTorch's compiler does not survive their "
                "fork; use one worker, or start the run with torchrun"
            )
        if engine == "stacked":
            check_stackable(world.size if world is not None else workers, compile)
        if len(clients) == 0:
            raise ValueError("there are no clients")
        check_samples(clients, test, drop=on_client_error == "drop")
        self.clients, self.local, self.seed = clients, local or LocalTraining(), seed
        self.active, self.weighting = count_active(active, len(clients)), weighting
        self.evaluate_every, self.dropout = evaluate_every, dropout
        self.max_update_norm, self.on_client_error = max_update_norm, on_client_error
        self.workers = world.size if world is not None else workers
        self.threads = 1 if threads is None and self.workers > 1 else threads

        check_module(model)  # a lazy one cannot even be copied
        self._model, self._flat = copy.deepcopy(model), FlatModel(copy.deepcopy(model), precision, compile)
        self.algorithm = self.algorithm.for_model(self._flat.tensors)
        buffers = self._flat.buffers()
        outputs = check_outputs(self._flat, clients, test, self.local, stacked=engine == "stacked")
        self._mixtures = _mixtures(clients, outputs) if per_client else None
        self.state = ServerState.initial(self.algorithm, self._flat.weights.clone(), buffers)
        self._world, self._pinned, self._begun = world, store == "pinned", False
        self.memories = self._store(folder, memory)
        self._here = (StackedEngine if engine == "stacked" else SerialEngine)(
            model=self._flat,
            clients=clients,
            algorithm=self.algorithm,
            local=self.local,
            seed=seed,
            threads=self.threads,
            by_examples=weighting == "examples",
            test=Batches(test, self._flat.device) if test is not None else None,
            store=self.memories,
            halt=StopFlag(),
            drop=on_client_error == "drop",
            max_norm=max_update_norm,
        )
        self._engine: SerialEngine | DistributedEngine | None = self._here if self.workers == 1 else None

    @property
    def weights(self) -> Tensor:
        """The trainable parameters of the global model as one flat vector, in `model.parameters()` order."""
        return self.state.weights.clone()

    @property
    def model(self) -> nn.Module:
        """A copy of the global model of now, in eval mode, ready to use or save; what is done to it stays with it."""
        module = copy.deepcopy(self._model)
        with torch.no_grad():
            for name, piece in zip(self._flat.names, self._flat.views(self.state.weights), strict=True):
                module.get_parameter(name).copy_(piece)
        Buffers(module).load(self.state.buffers)
        separate(module)
        return module.eval()

    @property
    def knows_memories(self) -> bool:
        """Whether this process can read what every client remembers; a pinned store leaves it with the workers."""
        return not (self._pinned and self.workers > 1)

    def replica(self) -> FlatModel:
        """A copy of the global model for somebody who trains beside the federation: its precision, not compiled."""
        return FlatModel(self.model, "bf16" if self._flat.bf16 else "fp32")

    def understudy(self) -> SerialEngine:
        """An engine that trains beside the federation by the same rules, on a replica; its memories are only read."""
        return dataclasses.replace(self._here, model=self.replica(), test=None)

    @property
    def joins_last(self) -> bool:
        """Whether a last batch of one sample joins the one before, as BatchNorm needs."""
        return self._flat.batch_norm

    def draw_active(self, round: int) -> list[int]:
        """The active clients of a round: uniform without replacement, in the order of their numbers."""
        draw = np.random.default_rng(seeds.derive(self.seed, "participation", round))
        return sorted(int(i) for i in draw.choice(len(self.clients), self.active, replace=False))

    def draw_silent(self, round: int, active: Sequence[int]) -> list[int]:
        """Those of the active clients that will never answer, each by its own draw."""
        draws = ((client, seeds.derive(self.seed, "dropout", round, client)) for client in active if self.dropout)
        return [client for client, seed in draws if np.random.default_rng(seed).random() < self.dropout]

    def round(self, active: Sequence[int] | None = None, *, evaluate: bool | None = None) -> Record:
        """One communication round, with the drawn clients or just these. On any error nothing has changed.

        `evaluate` says whether the new model is evaluated; None leaves it to `evaluate_every`.
        """
        chosen = self.draw_active(self.state.round) if active is None else self._check_active(active)
        silent = self.draw_silent(self.state.round, chosen)
        engine, sent, began = self._start(), self.state.broadcast(), time.perf_counter()
        try:
            outcome = engine.train(sent, [client for client in chosen if client not in silent])
            state = server_step(self.algorithm, self.state, outcome.reduction, len(self.clients))
            seconds = time.perf_counter() - began
            due = state.round % self.evaluate_every == 0 if evaluate is None else evaluate
            tested = engine.evaluate(state.broadcast()) if due else None
            record = Record(
                round=sent.round,
                active=chosen,
                train_loss=outcome.reduction.loss,
                test_loss=tested.loss if tested else None,
                test_accuracy=tested.accuracy if tested else None,
                lr=self.local.lr_at(sent.round, self.algorithm),
                seconds=seconds,
                backward_passes=outcome.backward_passes,
                bytes_down=sent.nbytes * len(chosen),
                bytes_up=outcome.bytes_up,
                divergence=outcome.reduction.divergence(state.weights - sent.weights),
                per_client=self._per_client(tested),
                dropped=dict(sorted({**dict.fromkeys(silent, DROPOUT), **outcome.dropped}.items())) or None,
            )
            engine.commit()
            self.state = state
        except Interrupted:
            self._here.halt.clear()
            raise
        except (KeyboardInterrupt, WorkerLost):
            self._abandon()
            raise
        return record

    def run(self, rounds: int) -> Iterator[Record]:
        """Train `rounds` more rounds, a record each; the model of the last one is always evaluated."""
        check_count("run", "rounds", rounds)
        self.local.check_decay(self.algorithm, self.state.round + rounds)
        for left in reversed(range(rounds)):
            yield self.round(evaluate=None if left else True)

    def halt(self, signum: int = signal.SIGINT) -> None:
        """Drop the round under way at its next step, from another thread: `round` raises Interrupted."""
        self._here.halt.request(signum)

    def stop_if_asked(self) -> None:
        """Raise Interrupted for a wish to stop that came too late for the last round."""
        self._here.halt.check()

    def save_memories(self, folder: Path, known: Collection[str] = ()) -> Saved:
        """Put what clients remember into a folder, lastingly; files that are `known` to be there stay as they are."""
        if self._engine is None and self._pinned and self._begun:
            raise ValueError("the workers that held the clients' memories are gone: start the run again")
        return (self._engine or self._here).save(folder, known)

    def collect_memories(self, folder: Path, named: Collection[str]) -> None:
        """Delete from a folder the memories that are not named."""
        (self._engine or self._here).collect(folder, named)

    def restore(self, state: ServerState, folder: Path, saved: Saved) -> None:
        """Go on from a state and the memories saved with it; refuses files that are not what was saved."""
        if self._engine is None:
            self.memories.forget()
        self._start().adopt(folder, saved.rounds, saved.digests)
        self.state = state

    def worker_loop(self) -> None:
        """In a process that torchrun started beside the leader: work for it until it stops."""
        if self._world is None or self._world.rank == 0:
            raise ValueError("only the processes beside the leader follow; the leader runs rounds")
        worker_loop(self._here, pinned=self._pinned, world=self._world)

    def close(self) -> None:
        """End the worker processes; a round after it starts new ones."""
        if isinstance(self._engine, DistributedEngine):
            self._engine.close()
            self._engine = None

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store(self, folder: Path | None, memory: int | None) -> Store:
        if self.workers > 1 and memory is not None:
            memory //= self.workers
        if self.workers > 1 and not self._pinned:
            memory = 0
        if memory is not None and folder is None:
            folder = Path(tempfile.mkdtemp(prefix="fedlesam-memory-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        if folder is not None and self._world is None and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder}: holds the memory of another run; choose another folder or empty it")
        return Store(folder, memory)

    def _start(self) -> SerialEngine | DistributedEngine:
        if self._engine is None:
            if self._pinned and len(self.memories):
                raise ValueError("the workers that held the clients' memories are gone: start the run again")
            serve = functools.partial(worker_loop, self._here, self._pinned)
            world = self._world or start_local(self.workers, self.threads, serve, self.lost_after)
            weakref.finalize(self, world.close, kill=True)
            self._engine = DistributedEngine(self._here, world, self._pinned)
            self._begun = True
        return self._engine

    def _abandon(self) -> None:
        if isinstance(self._engine, DistributedEngine):
            self._engine.world.close(kill=True)
            self._engine = None

    def _per_client(self, tested: Evaluation | None) -> PerClient | None:
        if tested is None or tested.by_class is None or self._mixtures is None:
            return None
        return evaluation.per_client(tested.by_class, self._mixtures)

    def _check_active(self, active: Sequence[int]) -> list[int]:
        for i in active:
            if isinstance(i, bool) or not isinstance(i, int | np.integer):
                raise ValueError(f"active must list client numbers, e.g. [0, 3], got {i!r} in {list(active)}")
        chosen = sorted(int(i) for i in active)
        if not chosen:
            raise ValueError("active is empty: a round needs at least one client")
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"active names a client twice: {chosen}")
        if chosen[0] < 0 or chosen[-1] >= len(self.clients):
            raise ValueError(f"active names clients outside 0 to {len(self.clients) - 1}: {chosen}")
        return chosen


def check_outputs(
    model: FlatModel, clients: Sequence[ClientData], test: ClientData | None, local: LocalTraining, stacked: bool
) -> int:
    """Show the model one sample, and check all labels against its outputs, before any work is done."""
    with seeds.preserve_rng(model.device):
        x, y = Batches(clients[0], model.device).fetch(torch.tensor([0]), seed=0)
    twice = torch.cat([x, x])  # batch statistics need more than one
    if model.state.own or model.state.frozen or stacked:
        with seeds.preserve_rng(model.device):
            changed = changed_buffers(model.module, twice)
        if stacked and changed:
            raise NotStackable(CHANGES.format(", ".join(changed)))
    model.module.eval()
    try:
        with torch.no_grad(), seeds.preserve_rng(model.device):
            output = model.forward(twice if model.needs_batch else x)
    except Unsupported:
        raise
    except Exception as error:
        raise ValueError(f"the model does not take {describe(x, model.weights.dtype)}: {error}") from error
    if local.loss is F.cross_entropy:
        check_labels(clients, test, y, output.shape)
    return output.shape[-1] if output.ndim else 1


def _mixtures(clients: Sequence[ClientData], classes: int) -> Tensor:
    rows = []
    for i, data in enumerate(clients):
        labels = known_labels(data)
        if labels is None or labels.is_floating_point() or labels.ndim != 1:
            raise ValueError(f"client {i}: per_client needs class numbers known in advance, as in a pair (x, y)")
        rows.append(evaluation.mixture(labels, classes))
    return torch.stack(rows)

"""The active clients side by side in several processes: one broadcast and one sum of the model per round.

The worker protocol: rank 0, the leader, broadcasts a message {"command": name, ...} and perhaps tensors; every process,
the leader included, executes the method of `Worker` with that name. A method that returns a reply is followed by a
gather of all replies at the leader; if it fails, the reply is its error, and the leader raises the first. Every process
has a SerialEngine for its share of the clients.
"""

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlesam.core.client_tests import ClientScore
from fedlesam.core.disk import Damaged, FileDigest, check_digest
from fedlesam.core.drawn import known_size
from fedlesam.core.evaluation import BatchScore, Evaluation
from fedlesam.core.messages import Broadcast, Memory
from fedlesam.core.reduction import ResultSummary
from fedlesam.core.slots import State
from fedlesam.core.state import flatten, unflatten
from fedlesam.engines.base import Engine, Outcome, Saved
from fedlesam.engines.errors import Error, describe, first_error
from fedlesam.engines.segments import NAME, Segment
from fedlesam.engines.serial import SerialEngine
from fedlesam.engines.signals import Interrupted
from fedlesam.engines.store import Store, anchor_file, client_file
from fedlesam.engines.world import WorkerLost, World

Reply = tuple[dict[str, Any], State]
"""What a process answers to a command: JSON and tensors."""

WITH_REPLY = ("train", "evaluate", "save", "find_files", "load_states")
"""The commands that every process answers. An error in another one ends the process, and with it the run."""


def assign(sizes: dict[int, int], homes: dict[int, int], workers: int) -> list[list[int]]:
    """The clients of each worker: the longest job first to the least busy worker.

    Args:
        sizes: client -> the length of its job.
        homes: client -> the worker that has its state, and therefore trains it.
        workers: the number of workers.
    """
    jobs: list[list[int]] = [[] for _ in range(workers)]
    load = [0] * workers
    for client in sorted(sizes, key=lambda c: (c not in homes, -sizes[c], c)):
        worker = homes.get(client, min(range(workers), key=lambda w: (load[w], w)))
        jobs[worker].append(client)
        load[worker] += sizes[client]
    return [sorted(job) for job in jobs]


class DistributedEngine(Engine):
    """The leader's side.

    Args:
        local_engine: of this process.
        world: all processes.
        pinned: whether a client's state stays with the process that trained it; else all share a folder.
    """

    def __init__(self, local_engine: SerialEngine, world: World, pinned: bool) -> None:
        self.local_engine, self.world, self.pinned = local_engine, world, pinned
        self._worker = Worker(local_engine, world, pinned)
        self._homes: dict[int, int] = {}
        self._jobs: list[list[int]] = []
        self._states: list[tuple[int, bool]] = []
        """The clients of the round, and whether their new state is not empty."""

    def train(self, broadcast: Broadcast, active: Sequence[int]) -> Outcome:
        self._send(broadcast)
        sizes = {client: self._steps(broadcast.round, client) for client in active}
        self._jobs = assign(sizes, self._homes if self.pinned else {}, self.world.size)
        replies = self._call("train", jobs=self._jobs)
        self._states = [pair for reply, _ in replies for pair in reply["states"]]
        self._call("sum_up", shapes=dict(sorted(shape for reply, _ in replies for shape in reply["sums"])))
        reduction = self.local_engine.reduction(broadcast, active)
        reduction.sums = self._worker.outcome.reduction.sums
        outcome = Outcome(reduction)
        for reply, tensors in replies:
            buffers = unflatten(tensors, *(str(client) for client, _ in reply["summaries"]))
            for client, summary in reply["summaries"]:
                reduction.summaries[client] = ResultSummary(**summary, buffers=buffers[str(client)])
            outcome.dropped |= dict(reply["dropped"])
            outcome.backward_passes += reply["backward_passes"]
            outcome.bytes_up += reply["bytes_up"]
        return outcome

    def evaluate(self, broadcast: Broadcast) -> Evaluation | None:
        if self.local_engine.test is None and self.local_engine.client_tests is None:
            return None
        self._send(broadcast)
        test, clients = [], []
        for reply, tensors in self._call("evaluate"):
            names = [f"test{score['number']}" for score in reply["test"]]
            names += [f"clients{number}-{place}" for (number, place) in (score["number"] for score in reply["clients"])]
            held = iter(unflatten(tensors, *names).values())
            test += [BatchScore(**score, kept=next(held)) for score in reply["test"]]
            for score in reply["clients"]:
                own = unflatten(next(held), "sums", "kept")
                clients.append(ClientScore(**{**score, "number": tuple(score["number"]), **own}))
        return self.local_engine.combined(test, clients)

    def commit(self) -> None:
        if self.pinned:
            states = dict(self._states)
            self._homes |= {c: rank for rank, job in enumerate(self._jobs) for c in job if states.get(c)}
        self._call("commit", states=self._states)

    def save(self, folder: Path, round: int, known: Mapping[str, FileDigest]) -> Saved:
        """States in a shared folder are saved by the leader, pinned ones by the process that has them."""
        if not self.pinned:
            return self.local_engine.save(folder, round, known)
        replies = self._call("save", folder=str(folder), round=round, known=_dicts(known))
        return Saved({name: digest for reply, _ in replies for name, digest in _digests(reply["digests"]).items()})

    def load_states(self, folder: Path, saved: Saved) -> None:
        """The leader loads states into a shared folder; a pinned one is loaded by a process that has its files.

        Where machines share no file system, each has the files of the clients that were pinned to it.
        """
        if not self.pinned:
            self.local_engine.load_states(folder, saved)
            self._load(self.local_engine.store.folder or folder, saved, [list(saved.digests)] * self.world.size)
            return
        replies = self._call("find_files", folder=str(folder), digests=_dicts(saved.digests))
        files = [reply["found"] for reply, _ in replies]
        shares: list[list[int]] = [[] for _ in files]
        for client, needed in self._needed(folder, saved, [reply["holds"] for reply, _ in replies]).items():
            able = [rank for rank, names in enumerate(files) if needed <= set(names)]
            if not able:
                raise Damaged(f"{folder / min(needed)}: is damaged, or no machine of this run has it")
            shares[able[client % len(able)]].append(client)
        replies = self._load(folder, saved, files, shares)
        self._homes = {client: rank for rank, (reply, _) in enumerate(replies) for client in reply["states"]}

    def _load(
        self, folder: Path, saved: Saved, files: list[list[str]], shares: list[list[int]] | None = None
    ) -> list[Reply]:
        old = None if saved.rounds is None else list(saved.rounds.items())
        arguments = {"files": files, "shares": shares, "old": old, "empty": list(saved.empty)}
        return self._call("load_states", folder=str(folder), **arguments)

    def _needed(self, folder: Path, saved: Saved, holds: list[dict[str, Any]]) -> dict[int, set[str]]:
        """The files each client's state is in; `holds` has the clients and rounds of the segments of each process."""
        if saved.rounds is not None:
            names = saved.digests.keys()
            return {c: {client_file(t, c), anchor_file(t)} & names for c, t in saved.rounds.items()}
        known = {name: dict(clients) for held in holds for name, clients in held.items()}
        if lost := saved.digests.keys() - known.keys():
            raise Damaged(f"{folder / min(lost)}: is damaged, or no machine of this run has it")
        rounds = sorted((round, client, name) for name, held in known.items() for client, round in held.items())
        return {client: {name} for _, client, name in rounds}

    def collect(self, folder: Path, named: Collection[str]) -> None:
        if self.pinned:
            self._call("collect", folder=str(folder), named=list(named))
        else:
            self.local_engine.collect(folder, named)

    def close(self) -> None:
        shutdown_workers(self.world)

    def _call(self, command: str, **arguments: Any) -> list[Reply]:
        """Have every process execute a command; its replies, in the order of the ranks."""
        message = {"command": command, **arguments}
        self.world.broadcast(message)
        replies = self._worker.execute(message)
        problem = first_error([reply.get("error") for reply, _ in replies], self._worker.error)
        if problem is not None:
            raise problem
        return replies

    def _send(self, broadcast: Broadcast) -> None:
        """The global model and what the rules send with it, once; after a round without results it is the same."""
        known = self._worker.broadcast
        if known is None or known.round != broadcast.round or known.weights is not broadcast.weights:
            self._worker.broadcast = broadcast
            self.world.broadcast({"command": "receive", "round": broadcast.round}, broadcast.flatten())

    def _steps(self, round: int, client: int) -> int:
        """Local steps, as the length of a job; of a client whose size is not known, its epochs."""
        engine, local = self.local_engine, self.local_engine.local
        size = known_size(engine.clients, client) or 1
        try:
            return local.steps_of(engine.seed, round, client, -(-size // local.batch_size))
        except Exception:  # of a function of one's own; it is raised again where the client trains
            return 0


class Worker:
    """One process's part in a round: a method per command of the leader. The leader has one, too.

    Args:
        engine: of this process.
        world: all processes.
        pinned: whether a client's state stays with the process that trained it.

    Arguments of the methods:
        tensors: of the broadcast, by name.
        round: from 0.
        jobs: for every process the clients that it trains.
        shapes: of the sums, by name; a process without clients has none.
        states: the clients that were trained, each with whether it has a state.
        folder: of the checkpoint.
        known: the files of the last checkpoint, with their digests.
        digests: the files of the checkpoint to load, with their digests.
        files: for every process the files that it loads.
        shares: for every process the clients that it loads; None for all of them.
        old: client and round, of a checkpoint of an earlier version; None for others.
        empty: the clients of such a checkpoint whose state is empty.
        named: the files to keep.
    """

    broadcast: Broadcast | None = None
    outcome: Outcome
    error: Error | None = None
    """Of the last command."""

    def __init__(self, engine: SerialEngine, world: World, pinned: bool) -> None:
        self.engine, self.world, self.pinned = engine, world, pinned

    def execute(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> list[Reply]:
        """Execute a command and take part in the gather of its replies; they are returned at rank 0 only.

        Args:
            message: the command with its arguments.
            tensors: sent with it.
        """
        arguments = dict(message)
        name, self.error = arguments.pop("command"), None
        command = getattr(self, name)
        try:
            reply = command(tensors, **arguments) if tensors else command(**arguments)
        except WorkerLost:
            raise
        except (Exception, Interrupted) as error:
            if name not in WITH_REPLY:
                raise
            self.error = error
            reply = {"error": describe(error, self.engine.training, self.world.rank)}, {}
        return self.world.gather(*reply) if name in WITH_REPLY else []

    def receive(self, tensors: State, round: int) -> None:
        """The global model of the next commands."""
        device = self.engine.model.device
        self.broadcast = Broadcast.unflatten(round, {name: tensor.to(device) for name, tensor in tensors.items()})

    def train(self, jobs: list[list[int]]) -> Reply:
        """Train this process's clients; the reply has all of the outcome but the sums."""
        assert self.broadcast is not None
        active = [client for job in jobs for client in job]
        outcome = self.engine.train_share(self.broadcast, jobs[self.world.rank], active, self._check)
        self.outcome, summaries = outcome, outcome.reduction.summaries
        reply = {
            "summaries": [
                (client, {name: value for name, value in vars(summary).items() if name != "buffers"})
                for client, summary in summaries.items()
            ],
            "dropped": list(outcome.dropped.items()),
            "states": [(client, state is None or bool(state)) for client, state in self.engine.pending.items()],
            "sums": [(name, list(total.shape)) for name, total in outcome.reduction.sums.items()],
            "backward_passes": outcome.backward_passes,
            "bytes_up": outcome.bytes_up,
        }
        return reply, flatten(**{str(client): summary.buffers for client, summary in summaries.items()})

    def sum_up(self, shapes: dict[str, list[int]]) -> None:
        """Add the sums of all processes up at the leader."""
        assert self.broadcast is not None
        reduction = self.outcome.reduction
        for name, shape in shapes.items():
            reduction.sums[name] = reduction.sum_of(name, self.broadcast.weights.new_empty(shape))
            self.world.add_up(reduction.sums[name].total)

    def evaluate(self) -> Reply:
        """Score this process's batches of the test data."""
        assert self.broadcast is not None
        test, clients = self.engine.score_share(self.broadcast, self.world.rank, self.world.size)
        reply = {"test": [_without(score, "kept") for score in test]}
        reply |= {"clients": [_without(score, "sums", "kept") for score in clients]}
        tensors = {f"test{score.number}": score.kept for score in test}
        for score in clients:
            tensors["clients{}-{}".format(*score.number)] = flatten(sums=score.sums, kept=score.kept)
        return reply, flatten(**tensors)

    def commit(self, states: list[tuple[int, bool]]) -> None:
        """Commit the round: with a shared folder the states of all clients, else those of this process."""
        if not self.pinned:
            self.engine.pending = {client: None if exists else Memory() for client, exists in states}
        self.engine.commit()

    def save(self, folder: str, round: int, known: dict[str, Any]) -> Reply:
        """Save the states of this process."""
        saved = self.engine.save(Path(folder), round, _digests(known), self.world.rank)
        return {"digests": _dicts(saved.digests)}, {}

    def find_files(self, folder: str, digests: dict[str, Any]) -> Reply:
        """Those of the saved files that this process can read and that are intact, and the clients in them."""
        found, holds = [], {}
        for name, digest in _digests(digests).items():
            with contextlib.suppress(Damaged):
                check_digest(Path(folder) / name, digest)
                if NAME.fullmatch(name):
                    holds[name] = list(Segment(Path(folder) / name).rounds.items())
                found.append(name)
        return {"found": found, "holds": holds}, {}

    def load_states(
        self,
        folder: str,
        files: list[list[str]],
        shares: list[list[int]] | None,
        old: list[tuple[int, int]] | None,
        empty: list[int],
    ) -> Reply:
        """Load the saved states, or this process's share of them; the reply says which clients have one here."""
        rank, store = self.world.rank, self.engine.store
        mine = None if shares is None else set(shares[rank])
        if old is None:
            store.load(Path(folder), files[rank], mine)
        else:
            rounds = {client: round for client, round in old if mine is None or client in mine}
            store.load_files(Path(folder), rounds, set(empty) & rounds.keys())
        return {"states": store.remembering()}, {}

    def collect(self, folder: str, named: list[str]) -> None:
        """Delete files that are not named."""
        self.engine.collect(Path(folder), named)

    def _check(self) -> None:
        self.engine.stop_flag.check()
        self.world.check()


def worker_loop(local_engine: SerialEngine, pinned: bool, world: World) -> None:
    """Execute the leader's commands until it stops; what every process but the leader does.

    Args:
        local_engine: of this process.
        pinned: whether a client's state stays with the process that trained it.
        world: all processes.
    """
    with _own_folder(local_engine.store, world.rank) if pinned else contextlib.nullcontext():
        worker = Worker(local_engine, world, pinned)
        while True:
            message, tensors = world.broadcast()
            if message["command"] == "stop":
                return
            worker.execute(message, tensors)


def shutdown_workers(world: World) -> None:
    """End the worker loops of the other processes.

    Args:
        world: all processes.
    """
    if not world.open:
        return
    if not world.lost.is_set():
        with contextlib.suppress(WorkerLost):
            world.broadcast({"command": "stop"})
    world.close()


@contextlib.contextmanager
def _own_folder(store: Store, rank: int) -> Iterator[None]:
    """Pinned states belong to this process alone: so do their files, which are deleted with it."""
    if store.folder is None:
        yield
        return
    store.folder = store.folder / f"worker{rank}"
    shutil.rmtree(store.folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(store.folder, ignore_errors=True)


def _without(score: object, *names: str) -> dict[str, Any]:
    """A score as JSON; its tensors are sent beside it."""
    return {name: value for name, value in vars(score).items() if name not in names}


def _dicts(digests: Mapping[str, FileDigest]) -> dict[str, Any]:
    return {name: asdict(digest) for name, digest in digests.items()}


def _digests(digests: Mapping[str, Any]) -> dict[str, FileDigest]:
    return {name: FileDigest(**digest) for name, digest in digests.items()}

"""The active clients side by side in several processes: one broadcast and one sum of the model per round."""

import builtins
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fedlesam.checks import NotFinite
from fedlesam.data.batches import size_of
from fedlesam.engines.serial import Outcome, SerialEngine
from fedlesam.engines.world import WorkerLost, World
from fedlesam.evaluation import BatchScore, Evaluation, combine
from fedlesam.messages import Broadcast
from fedlesam.reduction import ExactSum, Note, Reduction
from fedlesam.store import Store


def assign(sizes: dict[int, int], homes: dict[int, int], workers: int) -> list[list[int]]:
    """The clients of each worker: the longest job first to the least busy, but those with a home go there."""
    jobs: list[list[int]] = [[] for _ in range(workers)]
    load = [0] * workers
    for client in sorted(sizes, key=lambda c: (c not in homes, -sizes[c], c)):
        worker = homes.get(client, min(range(workers), key=lambda w: (load[w], w)))
        jobs[worker].append(client)
        load[worker] += sizes[client]
    return [sorted(job) for job in jobs]


class DistributedEngine:
    """The leader's side; `Follower` is the others'. Every process has a SerialEngine for its share of the clients."""

    def __init__(self, here: SerialEngine, world: World, pinned: bool) -> None:
        self.here, self.world, self.pinned = here, world, pinned
        self.store = here.store
        self.homes: dict[int, int] = {}
        self.jobs: list[list[int]] = []
        self.told: Tensor | None = None

    def train(self, sent: Broadcast, chosen: Sequence[int]) -> Outcome:
        self._tell(sent)
        sizes = {client: self._work(sent.round, client) for client in chosen}
        self.jobs = assign(sizes, self.homes if self.pinned else {}, self.world.size)
        self.world.broadcast({"do": "train", "jobs": self.jobs})
        outcome, error = work(self.here, sent, self.jobs[0], self.world)
        reports = self.world.gather(*report(outcome, described(error, self.here)))
        joined, problem = self._join(sent, reports), first_error(reports, error)
        if problem is None:
            try:
                joined.reduction.check_range()
            except NotFinite as too_large:
                problem = too_large
        names = sorted({name for about, _ in reports for name in about["names"]})
        self.world.broadcast({"names": [] if problem else names})
        if problem is not None:
            raise problem
        for name in names:
            total = outcome.reduction.sums.get(name) or ExactSum(sent.weights)
            self.world.add_up(total.total)
            joined.reduction.sums[name] = total
        return joined

    def _join(self, sent: Broadcast, reports: list[Any]) -> Outcome:
        """All that was reported; the sums come after."""
        reduction = Reduction(sent.round, self.here.by_examples)
        joined = Outcome(reduction)
        for about, tensors in reports:
            for client, note in about["notes"]:
                mark = f"{client}/"
                buffers = {name.removeprefix(mark): t for name, t in tensors.items() if name.startswith(mark)}
                reduction.notes[client] = Note(**note, buffers=buffers)
            reduction.lr = about["lr"] or reduction.lr
            joined.backward_passes += about["backward_passes"]
            joined.bytes_up += about["bytes_up"]
        return joined

    def evaluate(self, state: Broadcast) -> Evaluation | None:
        if self.here.test is None:
            return None
        self._tell(state)
        self.world.broadcast({"do": "evaluate"})
        about, error = score(self.here, state, self.world)
        heard = self.world.gather(about)
        problem = first_error(heard, error)
        if problem is not None:
            raise problem
        return combine([BatchScore(**score) for about, _ in heard for score in about["scores"]])

    def commit(self) -> None:
        if self.pinned:
            self.homes |= {client: rank for rank, job in enumerate(self.jobs) for client in job}
        self.world.broadcast({"do": "commit", "clients": [client for job in self.jobs for client in job]})
        commit_round(self.here, [client for job in self.jobs for client in job], self.pinned)

    def close(self) -> None:
        dismiss(self.world)

    def _tell(self, sent: Broadcast) -> None:
        """The global model and what the rules broadcast with it, once per round."""
        if self.told is sent.weights:
            return
        self.told = sent.weights
        tensors = {f"buffers/{name}": tensor for name, tensor in sent.buffers.items()}
        for slot in ("perturbation", "correction"):
            tensors |= {f"{slot}/{name}": tensor for name, tensor in getattr(sent, slot).items()}
        self.world.broadcast({"do": "state", "round": sent.round}, {"weights/": sent.weights, **tensors})

    def _work(self, round: int, client: int) -> int:
        """Local steps, as the measure of a job."""
        local, size = self.here.local, size_of(self.here.clients[client])
        return local.epochs_of(self.here.seed, round, client) * -(-size // local.batch_size)


def dismiss(world: World) -> None:
    """Let the others go."""
    if not world.lost.is_set():
        with contextlib.suppress(WorkerLost):
            world.broadcast({"do": "stop"})
    world.close()


def follow(here: SerialEngine, pinned: bool, world: World) -> None:
    """What every process but the leader does until the leader says stop."""
    with contextlib.ExitStack() as stack:
        if pinned:
            stack.enter_context(own_folder(here.store, world.rank))
        _serve(here, pinned, world)


@contextlib.contextmanager
def own_folder(store: Store, rank: int) -> Iterator[None]:
    """Pinned memory is this process's alone: its files are too, and go with it."""
    if store.folder is None:
        yield
        return
    store.folder = store.folder / f"worker{rank}"
    shutil.rmtree(store.folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(store.folder, ignore_errors=True)


def _serve(here: SerialEngine, pinned: bool, world: World) -> None:
    sent: Broadcast | None = None
    while True:
        about, tensors = world.broadcast()
        if about["do"] == "stop":
            return
        if about["do"] == "state":
            sent = received(about["round"], tensors, here)
        elif about["do"] == "commit":
            commit_round(here, about["clients"], pinned)
        elif sent is not None and about["do"] == "evaluate":
            world.gather(score(here, sent, world)[0])
        elif sent is not None and about["do"] == "train":
            outcome, error = work(here, sent, about["jobs"][world.rank], world)
            world.gather(*report(outcome, described(error, here, world.rank)))
            names = world.broadcast()[0]["names"]
            for name in names:
                world.add_up((outcome.reduction.sums.get(name) or ExactSum(sent.weights)).total)


def received(round: int, tensors: dict[str, Tensor], here: SerialEngine) -> Broadcast:
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "buffers": {}, "perturbation": {}, "correction": {}}
    for name, tensor in tensors.items():
        part, _, key = name.partition("/")
        parts[part][key] = tensor.to(here.model.device)
    return Broadcast(round, parts["weights"][""], parts["buffers"], parts["perturbation"], parts["correction"])


def work(here: SerialEngine, sent: Broadcast, job: list[int], world: World) -> tuple[Outcome, Exception | None]:
    try:
        return here.train_here(sent, job, world.check), None
    except WorkerLost:
        raise
    except Exception as error:
        return Outcome(Reduction(sent.round)), error


def score(here: SerialEngine, state: Broadcast, world: World) -> tuple[Any, Exception | None]:
    try:
        scores = here.score_here(state, world.rank, world.size)
        return {"scores": [asdict(score) for score in scores], "error": None}, None
    except Exception as error:
        return {"scores": [], "error": described(error, here, world.rank)}, error


def report(outcome: Outcome, error: dict[str, Any] | None) -> tuple[Any, dict[str, Tensor]]:
    """What the leader has to hear of a share of the round, but for the sums."""
    reduction, notes = outcome.reduction, []
    buffers: dict[str, Tensor] = {}
    for client, note in reduction.notes.items():
        notes.append((client, {name: value for name, value in vars(note).items() if name != "buffers"}))
        buffers |= {f"{client}/{name}": tensor for name, tensor in note.buffers.items()}
    about = {
        "notes": notes,
        "names": list(reduction.sums),
        "lr": reduction.lr,
        "backward_passes": outcome.backward_passes,
        "bytes_up": outcome.bytes_up,
        "error": error,
    }
    return about, buffers


def described(error: Exception | None, here: SerialEngine, rank: int = 0) -> dict[str, Any] | None:
    """An exception as data; of a class that is not Python's own, the nearest that is."""
    if error is None:
        return None
    simple = all(isinstance(part, str | int | float) for part in error.args)
    return {
        "kind": next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"),
        "args": list(error.args) if simple else [str(error)],
        "notes": getattr(error, "__notes__", []),
        "finite": [error.what, error.round, error.client] if isinstance(error, NotFinite) else None,
        "client": error.client if isinstance(error, NotFinite) else here.training,
        "rank": rank,
    }


def rebuilt(error: dict[str, Any]) -> Exception:
    """The same exception here; nothing of it is unpickled."""
    kind = getattr(builtins, error["kind"])
    try:
        made: Exception = NotFinite(*error["finite"]) if error["finite"] else kind(*error["args"])
    except TypeError:
        made = RuntimeError(f"{error['kind']}: {error['args']}")
    for note in error["notes"]:
        made.add_note(note)
    return made


def first_error(reports: list[Any], mine: Exception | None) -> Exception | None:
    """The one that a single process would have met first: its client has the smallest number."""
    errors = sorted((about["error"] for about, _ in reports if about["error"]), key=lambda e: (e["client"], e["rank"]))
    if not errors:
        return None
    return mine if errors[0]["rank"] == 0 else rebuilt(errors[0])


def commit_round(here: SerialEngine, clients: list[int], pinned: bool) -> None:
    """With a store that all share, everyone learns who was active; pinned, everyone keeps what is theirs."""
    if here.sent is None:
        return
    mine = clients if not pinned else list(here.pending)
    here.store.commit(here.sent.round, here.sent.weights, {client: here.pending.get(client) for client in mine})
    here.pending = {}

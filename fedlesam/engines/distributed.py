"""The active clients side by side in several processes: one broadcast and one sum of the model per round."""

import builtins
import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlesam.core.batches import size_of
from fedlesam.core.checks import NotFinite
from fedlesam.core.disk import Damaged, FileDigest, check_digest
from fedlesam.core.evaluation import BatchScore, Evaluation, combine
from fedlesam.core.messages import Broadcast, Memory
from fedlesam.core.reduction import ResultSummary
from fedlesam.engines.serial import Outcome, Saved, SerialEngine, without_file
from fedlesam.engines.signals import Interrupted
from fedlesam.engines.store import Store, anchor_file, client_file
from fedlesam.engines.world import WorkerLost, World

Error = Exception | Interrupted
"""What a process reports and the leader raises."""


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
        self.remember: list[tuple[int, bool]] = []
        """Who answered, and whether there is anything to remember."""
        self.told: tuple[int, Tensor] | None = None
        """The round and the model that the others have; after a round without answers the model is the same."""

    def train(self, sent: Broadcast, chosen: Sequence[int]) -> Outcome:
        self._tell(sent)
        sizes = {client: self._work(sent.round, client) for client in chosen}
        self.jobs = assign(sizes, self.homes if self.pinned else {}, self.world.size)
        self.world.broadcast({"do": "train", "jobs": self.jobs})
        outcome, error = work(self.here, sent, self.jobs, self.world)
        reports = self.world.gather(*report(self.here, outcome, described(error, self.here)))
        joined, problem = self._join(sent, chosen, reports), first_error(reports, error)
        self.remember = [pair for about, _ in reports for pair in about["remember"]]
        names = sorted({name for about, _ in reports for name in about["names"]})
        self.world.broadcast({"names": [] if problem else names})
        if problem is not None:
            raise problem
        for name in names:
            total = outcome.reduction.sum_of(name, sent.weights)
            self.world.add_up(total.total)
            joined.reduction.sums[name] = total
        return joined

    def _join(self, sent: Broadcast, chosen: Sequence[int], reports: list[Any]) -> Outcome:
        """All that was reported; the sums come after."""
        reduction = self.here.reduction(sent, chosen)
        joined = Outcome(reduction)
        for about, tensors in reports:
            for client, note in about["notes"]:
                mark = f"{client}/"
                buffers = {name.removeprefix(mark): t for name, t in tensors.items() if name.startswith(mark)}
                reduction.summaries[client] = ResultSummary(**note, buffers=buffers)
            joined.dropped |= dict(about["dropped"])
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
            remember = dict(self.remember)
            self.homes |= {c: rank for rank, job in enumerate(self.jobs) for c in job if remember.get(c)}
        self.world.broadcast({"do": "commit", "remember": self.remember})
        commit_round(self.here, self.remember, self.pinned)

    def save(self, folder: Path, known: Collection[str]) -> Saved:
        """Memories that all share the leader saves; pinned ones everyone saves for themselves."""
        if not self.pinned:
            return self.here.save(folder, known)
        self.world.broadcast({"do": "save", "folder": str(folder), "known": list(known)})
        about, error = save_here(self.here, folder, known, self.world.rank)
        heard = self.world.gather(about)
        problem = first_error(heard, error)
        if problem is not None:
            raise problem
        saved = Saved({}, {})
        for about, _ in heard:
            saved.rounds.update(about["rounds"])
            saved.digests.update({name: FileDigest(**seal) for name, seal in about["digests"].items()})
        return saved

    def adopt(self, folder: Path, rounds: Mapping[int, int], digests: Mapping[str, FileDigest]) -> None:
        """Memories that all share are the leader's to look after; pinned ones go to a machine that has them.

        Where machines share no file system, each has the files of the clients that were pinned to it.
        """
        empty = without_file(rounds, digests)
        if not self.pinned:
            self.here.adopt(folder, rounds, digests)
            self.world.broadcast({"do": "know", "rounds": list(rounds.items()), "empty": list(empty)})
            return
        wanted = {name: asdict(seal) for name, seal in digests.items()}
        self.world.broadcast({"do": "have?", "folder": str(folder), "digests": wanted})
        have = [set(about["have"]) for about, _ in self.world.gather({"have": intact(folder, digests)})]
        shares: list[dict[int, int]] = [{} for _ in have]
        missing = []
        for client, round in rounds.items():
            needs = {client_file(round, client), anchor_file(round)} & digests.keys()
            able = [rank for rank, names in enumerate(have) if needs <= names]
            if able:
                shares[able[client % len(able)]][client] = round
            else:
                missing.append(client_file(round, client))
        if missing:
            raise Damaged(f"{folder / missing[0]}: is damaged or on no machine of this run")
        self.homes = {client: rank for rank, share in enumerate(shares) for client in share if client not in empty}
        hands = [list(share.items()) for share in shares]
        self.world.broadcast({"do": "adopt", "folder": str(folder), "shares": hands, "empty": list(empty)})
        about, error = adopt_share(self.here, folder, shares[0], empty, self.world.rank)
        problem = first_error(self.world.gather(about), error)
        if problem is not None:
            raise problem

    def collect(self, folder: Path, named: Collection[str]) -> None:
        if self.pinned:
            self.world.broadcast({"do": "collect", "folder": str(folder), "named": list(named)})
        self.here.collect(folder, named)

    def close(self) -> None:
        shutdown_workers(self.world)

    def _tell(self, sent: Broadcast) -> None:
        """The global model and what the rules broadcast with it, once per round."""
        if self.told is not None and self.told[0] == sent.round and self.told[1] is sent.weights:
            return
        self.told = sent.round, sent.weights
        tensors = {f"buffers/{name}": tensor for name, tensor in sent.buffers.items()}
        for slot in ("perturbation", "correction"):
            tensors |= {f"{slot}/{name}": tensor for name, tensor in getattr(sent, slot).items()}
        self.world.broadcast({"do": "state", "round": sent.round}, {"weights/": sent.weights, **tensors})

    def _work(self, round: int, client: int) -> int:
        """Local steps, as the measure of a job."""
        local, size = self.here.local, size_of(self.here.clients[client])
        return local.epochs_of(self.here.seed, round, client) * -(-size // local.batch_size)


def shutdown_workers(world: World) -> None:
    """Let the others go."""
    if not world.open:
        return
    if not world.lost.is_set():
        with contextlib.suppress(WorkerLost):
            world.broadcast({"do": "stop"})
    world.close()


def worker_loop(here: SerialEngine, pinned: bool, world: World) -> None:
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
        folder = Path(about.get("folder", ""))
        if about["do"] == "state":
            sent = received(about["round"], tensors, here)
        elif about["do"] == "commit":
            commit_round(here, about["remember"], pinned)
        elif about["do"] == "save":
            world.gather(save_here(here, folder, about["known"], world.rank)[0])
        elif about["do"] == "have?":
            digests = {name: FileDigest(**seal) for name, seal in about["digests"].items()}
            world.gather({"have": intact(folder, digests)})
        elif about["do"] == "know":
            here.store.know(dict(about["rounds"]), about["empty"])
        elif about["do"] == "adopt":
            share = dict(about["shares"][world.rank])
            world.gather(adopt_share(here, folder, share, about["empty"], world.rank)[0])
        elif about["do"] == "collect":
            here.collect(folder, about["named"])
        elif sent is not None and about["do"] == "evaluate":
            world.gather(score(here, sent, world)[0])
        elif sent is not None and about["do"] == "train":
            outcome, error = work(here, sent, about["jobs"], world)
            world.gather(*report(here, outcome, described(error, here, world.rank)))
            names = world.broadcast()[0]["names"]
            for name in names:
                world.add_up(outcome.reduction.sum_of(name, sent.weights).total)


def received(round: int, tensors: dict[str, Tensor], here: SerialEngine) -> Broadcast:
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "buffers": {}, "perturbation": {}, "correction": {}}
    for name, tensor in tensors.items():
        part, _, key = name.partition("/")
        parts[part][key] = tensor.to(here.model.device)
    return Broadcast(round, parts["weights"][""], parts["buffers"], parts["perturbation"], parts["correction"])


def work(here: SerialEngine, sent: Broadcast, jobs: list[list[int]], world: World) -> tuple[Outcome, Error | None]:
    def check() -> None:
        here.halt.check()
        world.check()

    everyone = [client for job in jobs for client in job]
    try:
        return here.train_here(sent, jobs[world.rank], everyone, check), None
    except WorkerLost:
        raise
    except (Exception, Interrupted) as error:
        here.pending = {}
        return Outcome(here.reduction(sent, [])), error


def score(here: SerialEngine, state: Broadcast, world: World) -> tuple[Any, Error | None]:
    try:
        scores = here.score_here(state, world.rank, world.size)
        return {"scores": [asdict(score) for score in scores], "error": None}, None
    except (Exception, Interrupted) as error:
        return {"scores": [], "error": described(error, here, world.rank)}, error


def save_here(here: SerialEngine, folder: Path, known: Collection[str], rank: int) -> tuple[Any, Error | None]:
    try:
        saved = here.save(folder, set(known))
    except Exception as error:
        return {"rounds": [], "digests": {}, "error": described(error, here, rank)}, error
    digests = {name: asdict(seal) for name, seal in saved.digests.items()}
    return {"rounds": list(saved.rounds.items()), "digests": digests, "error": None}, None


def adopt_share(
    here: SerialEngine, folder: Path, share: Mapping[int, int], empty: Collection[int], rank: int
) -> tuple[Any, Error | None]:
    try:
        here.store.adopt(folder, share, set(empty) & share.keys())
    except Exception as error:
        return {"error": described(error, here, rank)}, error
    return {"error": None}, None


def intact(folder: Path, digests: Mapping[str, FileDigest]) -> list[str]:
    """Those of the sealed files that lie here unharmed."""
    found = []
    for name, seal in digests.items():
        with contextlib.suppress(Damaged):
            check_digest(folder / name, seal)
            found.append(name)
    return found


def report(here: SerialEngine, outcome: Outcome, error: dict[str, Any] | None) -> tuple[Any, dict[str, Tensor]]:
    """What the leader has to hear of a share of the round, but for the sums."""
    reduction, notes = outcome.reduction, []
    buffers: dict[str, Tensor] = {}
    for client, note in reduction.summaries.items():
        notes.append((client, {name: value for name, value in vars(note).items() if name != "buffers"}))
        buffers |= {f"{client}/{name}": tensor for name, tensor in note.buffers.items()}
    about = {
        "notes": notes,
        "dropped": list(outcome.dropped.items()),
        "remember": [(client, memory is None or bool(memory)) for client, memory in here.pending.items()],
        "names": list(reduction.sums),
        "lr": reduction.lr,
        "backward_passes": outcome.backward_passes,
        "bytes_up": outcome.bytes_up,
        "error": error,
    }
    return about, buffers


def described(error: Error | None, here: SerialEngine, rank: int = 0) -> dict[str, Any] | None:
    """An exception as data; of a class that is not Python's own, the nearest that is."""
    if error is None:
        return None
    simple = all(isinstance(part, str | int | float) for part in error.args)
    return {
        "kind": next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"),
        "args": list(error.args) if simple else [str(error)],
        "notes": getattr(error, "__notes__", []),
        "finite": [error.what, error.round, error.client, error.remedy] if isinstance(error, NotFinite) else None,
        "signum": error.signum if isinstance(error, Interrupted) else None,
        "client": error.client if isinstance(error, NotFinite) else here.training,
        "rank": rank,
    }


def rebuilt(error: dict[str, Any]) -> Error:
    """The same exception here; nothing of it is unpickled."""
    if error["signum"]:
        return Interrupted(error["signum"])
    kind = getattr(builtins, error["kind"])
    try:
        made: Exception = NotFinite(*error["finite"]) if error["finite"] else kind(*error["args"])
    except TypeError:
        made = RuntimeError(f"{error['kind']}: {error['args']}")
    for note in error["notes"]:
        made.add_note(note)
    return made


def first_error(reports: list[Any], mine: Error | None) -> Error | None:
    """The one that a single process would have met first: its client has the smallest number; but a stop is a stop."""
    found = [about["error"] for about, _ in reports if about["error"]]
    errors = sorted(found, key=lambda e: (e["signum"] is None, e["client"], e["rank"]))
    if not errors:
        return None
    return mine if errors[0]["rank"] == 0 else rebuilt(errors[0])


def commit_round(here: SerialEngine, remember: list[tuple[int, bool]], pinned: bool) -> None:
    """With a store that all share, everyone learns who answered; pinned, everyone keeps what is theirs."""
    if here.sent is None:
        return
    new = here.pending if pinned else {client: None if keeps else Memory() for client, keeps in remember}
    here.store.commit(here.sent.round, here.sent.weights, new)
    here.pending = {}

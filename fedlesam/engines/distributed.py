"""The active clients side by side in several processes: one broadcast and one sum of the model per round."""

import contextlib
from collections.abc import Sequence
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
        reports = self.world.gather(*report(outcome, error))
        errors = sorted((about["error"] for about, _ in reports if about["error"]), key=lambda e: e["client"])
        names = sorted({name for about, _ in reports for name in about["bounds"]})
        self.world.broadcast({"names": [] if errors else names})
        if errors:
            raise error if error is not None and errors[0]["rank"] == 0 else rebuilt(errors[0])
        return self._join(sent, reports, outcome, names)

    def _join(self, sent: Broadcast, reports: list[Any], outcome: Outcome, names: list[str]) -> Outcome:
        reduction = Reduction(sent.round, self.here.by_examples)
        for name in names:
            total = outcome.reduction.sums.get(name) or ExactSum(sent.weights)
            total.bound = sum(about["bounds"].get(name, 0.0) for about, _ in reports)
            if total.bound >= ExactSum.LIMIT:
                raise NotFinite(f"{name} is too large to be averaged or", sent.round, min(self.jobs[0], default=0))
            self.world.add_up(total.total)
            reduction.sums[name] = total
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
        mine = self.here.score_here(state, 0, self.world.size)
        heard = self.world.gather([asdict(score) for score in mine])
        return combine([BatchScore(**score) for about, _ in heard for score in about])

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
            world.gather([asdict(score) for score in here.score_here(sent, world.rank, world.size)])
        elif sent is not None and about["do"] == "train":
            outcome, error = work(here, sent, about["jobs"][world.rank], world)
            world.gather(*report(outcome, error, world.rank))
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


def report(outcome: Outcome, error: Exception | None, rank: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """What the leader has to hear of a share of the round, but for the sums."""
    reduction, notes = outcome.reduction, []
    buffers: dict[str, Tensor] = {}
    for client, note in reduction.notes.items():
        notes.append((client, {name: value for name, value in vars(note).items() if name != "buffers"}))
        buffers |= {f"{client}/{name}": tensor for name, tensor in note.buffers.items()}
    about = {
        "notes": notes,
        "bounds": {name: total.bound for name, total in reduction.sums.items()},
        "lr": reduction.lr,
        "backward_passes": outcome.backward_passes,
        "bytes_up": outcome.bytes_up,
        "error": None,
    }
    if error is not None:
        what, client = getattr(error, "what", ""), getattr(error, "client", 0)
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        kind = "value" if isinstance(error, ValueError) else "finite" if isinstance(error, NotFinite) else "other"
        about["error"] = {
            "kind": kind, "text": text, "what": what, "client": client, "round": reduction.round, "rank": rank,
        }  # fmt: skip
    return about, buffers


def rebuilt(error: dict[str, Any]) -> Exception:
    if error["kind"] == "finite":
        return NotFinite(error["what"], error["round"], error["client"])
    return ValueError(error["text"]) if error["kind"] == "value" else RuntimeError(error["text"])


def commit_round(here: SerialEngine, clients: list[int], pinned: bool) -> None:
    """With a store that all share, everyone learns who was active; pinned, everyone keeps what is theirs."""
    if here.sent is None:
        return
    mine = clients if not pinned else list(here.pending)
    here.store.commit(here.sent.round, here.sent.weights, {client: here.pending.get(client) for client in mine})
    here.pending = {}

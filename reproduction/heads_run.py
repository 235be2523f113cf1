"""Train heads on frozen features: a line a run, by any number of processes."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedlesam import algorithms, data
from fedlesam.core.local import LocalTraining
from fedlesam.data.dataset import DataSet, Images
from fedlesam.data.features import Request
from fedlesam.engines.settings import Execution
from fedlesam.federation import Federation
from fedlesam.models.catalogue import make_model
from fedlesam.probes.sharpness import Sharpness, rise
from fedlesam.runs.versions import versions
from reproduction import leaderboard
from reproduction.heads import NAME, Bench, Trial
from reproduction.heads_engine import use_head_engine
from reproduction.leaderboard import Entry

Places = npt.NDArray[np.int64]
WAIT = 5.0
"""Seconds until a process that has nothing to do looks again."""


def load(data_dir: Path | None, smoke: bool = False, of: str = "cifar10") -> DataSet:
    """The features of a data set; embedded digits in their place, to see that it runs."""
    if not smoke:
        return data.load(f"features:{(data_dir or Path('data')) / Request(of, mirror=True, pca=256).file}")
    digits = data.load("digits")
    train, test = (Images(part.x.flatten(1)[:, None, None] / 16, part.y) for part in (digits.train, digits.test))
    return dataclasses.replace(digits, train=train, test=test, mean=(0.0,), std=(1.0,), scale=1.0)


@dataclass(frozen=True)
class Problem:
    """The images of a run: whose training images each client has, and what it is judged on as test images."""

    data: DataSet
    clients: list[Places]


@dataclass
class Runner:
    """Trains trials of one bench on one data set.

    Attributes:
        bench: The problem.
        whole: All images.
    """

    bench: Bench
    whole: DataSet
    made: dict[str, str] = field(default_factory=versions)
    study: ClassVar[str] = NAME
    execution: ClassVar[Execution] = Execution(threads=1, engine="stacked")

    def line(self, trial: Trial) -> dict[str, Any]:
        """The line of a run of a study with arms."""
        command = f"python -m reproduction {self.study} --only {self.selection()}"
        return {**dataclasses.asdict(trial), **self.train(self.federation(trial)), "command": command}

    def selection(self) -> str:
        """What `--only` selects this problem by."""
        return f"data={self.bench.data},splits={self.bench.split},images={self.bench.images // self.bench.clients}"

    def train(self, federation: Federation, watch: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Train all rounds, and return what is to be known of them; `watch` is called with each number before it."""
        began, wall, tested = time.process_time(), time.time(), []
        for number in range(self.bench.rounds):
            if watch is not None:
                watch(number)
            last = number == self.bench.rounds - 1
            tested.append(federation.round(evaluate=True if last else None).test_accuracy)
        evaluations = [round(100 * value, 4) for value in tested if value is not None]
        return {
            "rounds": self.bench.rounds,
            "images": self.bench.images,
            "clients": self.bench.clients,
            "of": self.bench.data,
            "last": evaluations[-1],
            "mean_of_last": round(float(np.mean(evaluations[-self.bench.last :])), 4),
            "best": max(evaluations),
            "dropped": sum(len(record.dropped or ()) for record in federation.history),
            "processor_seconds": round(time.process_time() - began, 1),
            "seconds": round(time.time() - wall, 1),
            "data": self.whole.fingerprint[:16],
            "commit": self.made["commit"],
            "torch": self.made["torch"],
            "evaluations": evaluations,
        }

    def entry(self, trial: Entry) -> dict[str, Any]:
        """The line of a run of `leaderboard`: also the sharpness of its last model, on all training images."""
        federation = self.federation(trial)
        line = self.train(federation)
        loss = Sharpness(samples=0).loss(federation)
        line["sharpness"] = rise(loss, federation.state.weights, radius=0.1, steps=10).ascent
        whole = {**dataclasses.asdict(trial), "settings": trial.hyper, "lr": trial.lr, **line}
        return {**whole, "command": f"python -m reproduction {leaderboard.NAME}"}

    def problem(self, trial: "HeadTrial") -> Problem:
        """The images of a run: drawn anew for every seed."""
        bench = self.bench
        all_of_them = bench.images == len(self.whole.train) and not trial.tuning
        pool = self.whole if all_of_them else data.select(self.whole, None, bench.held_out)
        drawn = draw(pool.train.y.numpy(), min(bench.images, len(pool.train)), trial.seed)
        split = data.split(_scheme(bench.split), pool.train.y[drawn], bench.clients, trial.seed)
        judged = pool.test if trial.tuning else self.whole.test
        return Problem(dataclasses.replace(pool, test=judged), [drawn[part] for part in split.clients])

    def federation(self, trial: "HeadTrial") -> Federation:
        """The federation of a run, before its first round."""
        bench, problem = self.bench, self.problem(trial)
        local = LocalTraining(
            lr=trial.lr,
            epochs=bench.epochs,
            batch_size=bench.batch_size,
            clip_scope="corrected",
            augment=self.whole.augment,
        )
        federation = Federation(
            make_model(bench.model, problem.data.shape, len(self.whole.classes), trial.seed),
            [problem.data.shard(torch.from_numpy(part)) for part in problem.clients],
            algorithms.get(trial.method, **trial.hyper),
            local,
            active=bench.active,
            test=problem.data.test_shard(),
            seed=trial.seed,
            evaluate_every=bench.every,
            execution=self.execution,
        )
        if self.execution.engine == "stacked":
            use_head_engine(federation)
        return federation


def draw(labels: Places, count: int, seed: int) -> Places:
    """Places of `count` samples, the same number of each class, at random; of all where there are no more."""
    if count == len(labels):
        return np.arange(count)
    rng = np.random.default_rng([seed, len(labels)])
    classes = np.unique(labels)
    each = [rng.choice(np.flatnonzero(labels == c), count // len(classes), replace=False) for c in classes]
    return np.sort(np.concatenate(each))


def _scheme(split: str) -> str:
    """`pathological-3` as `pathological:3`."""
    return ":".join(split.split("-", 1))


class HeadTrial(Protocol):
    """What a run of heads is made of."""

    @property
    def method(self) -> str: ...
    @property
    def hyper(self) -> dict[str, Any]: ...
    @property
    def lr(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def tuning(self) -> bool: ...
    @property
    def key(self) -> str: ...


def work(
    pending: Callable[[], list[Any]],
    line: Callable[[Any], dict[str, Any]],
    path: Path,
    log: Callable[[str], None],
    name: str = "",
) -> None:
    """Train what is not there until nothing is left; other processes may do the same.

    Args:
        pending: The runs that can be made now, from the lines of the file.
        line: Trains one and returns its line.
        path: The file of lines.
        log: Prints a line when a run ends.
        name: Of the problem, where several share the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while left := pending():
        for trial in left:
            with claimed(path.parent / f".{name}-{trial.key}.pid") as mine:
                if mine and trial in pending():
                    made = line(trial)
                    append(path, made)
                    log(f"{trial.key}: {made['mean_of_last']:.2f}, {made['processor_seconds']:.0f} s of processor time")
                    break
        else:
            time.sleep(WAIT)


@contextlib.contextmanager
def claimed(path: Path) -> Any:
    """Whether this process has a run: a file with its number, which a dead process loses."""
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):
            if not _alive(int(path.read_text())):
                path.unlink(missing_ok=True)
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def append(path: Path, line: dict[str, Any]) -> None:
    """One line in one write, on disk when it returns."""
    with path.open("ab") as file:
        file.write(f"{json.dumps(line)}\n".encode())
        file.flush()
        os.fsync(file.fileno())

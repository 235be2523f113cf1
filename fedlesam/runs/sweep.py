"""A queue of runs in one folder: equal runs once, several at a time; the same call again resumes it."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from fedlesam.core import disk
from fedlesam.core.names import file_name
from fedlesam.engines.signals import Interrupted, handle_signals
from fedlesam.runs import config as configs
from fedlesam.runs import lock, order
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.together import companies

FORM = 1
"""Of the folder. Another one is refused, and so is one of another version of the package: its numbers may be others."""


@dataclass(frozen=True)
class Task:
    """A run of a sweep."""

    config: RunConfig
    """The run's settings."""
    folder: Path
    """Its run folder."""
    label: str
    """What it is called in messages."""


@dataclass(frozen=True)
class Event:
    """What a run has just done."""

    task: Task
    """The run."""
    what: str
    """round, finished or failed"""
    round: int = 0
    """Rounds done."""
    why: str = ""
    """The reason of a failure."""
    state: str = ""
    """What a round that was evaluated reached."""


Watch = Callable[[Event], None]


class Sweep:
    """The folder: sweep.json, runs/, failed.json with what went wrong, log.txt with what the runs printed.

    Args:
        path: The sweep's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._description, self._failures = path, path / "sweep.json", path / "failed.json"
        self.failed: dict[str, dict[str, str]] = {}
        """By the run's folder: its label and why it failed."""

    @contextlib.contextmanager
    def open(self) -> Iterator["Sweep"]:
        """Hold the folder, as the only process; one of another version, or of something else, is refused."""
        this = {"form": FORM, "fedlesam": version("fedlesam")}
        self._check(this)
        self.path.mkdir(parents=True, exist_ok=True)
        with lock.locked(self.path):
            self._check(this)
            if not self._description.exists():
                disk.write_json(self._description, this)
            self.failed = json.loads(self._failures.read_text(encoding="utf-8")) if self._failures.exists() else {}
            yield self

    def _check(self, this: dict[str, Any]) -> None:
        if not self._description.exists():
            if self.path.exists() and not RunFolder(self.path).is_empty():
                raise ValueError(f"{self.path}: is not empty and not a sweep folder; choose another with --out")
            return
        try:
            other = json.loads(self._description.read_text(encoding="utf-8"))
            form, package = other["form"], other["fedlesam"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{self._description}: does not describe a sweep: {error}"
            raise ValueError(f"{what}; choose another --out") from error
        if (form, package) != (this["form"], this["fedlesam"]):
            raise ValueError(
                f"{self.path}: was made by fedlesam {package} (folder form {form}), this is {this['fedlesam']} (form "
                f"{this['form']}), and their numbers are not mixed; choose another --out, or use fedlesam {package}"
            )

    def folder_of(self, config: RunConfig) -> Path:
        """Named by a hash of the settings, so equal runs share a folder.

        Probes do not change a run, so a finished run with probes also counts as the run without them.

        Args:
            config: Resolved settings.
        """
        stem = file_name(f"{config.algorithm}-{config.data}-{config.split}")
        name = f"{stem}-{configs.fingerprint(config)[:12]}"
        if config.probe:
            return self.path / "runs" / f"{name}-{file_name(config.probe)}"
        measured = sorted((self.path / "runs").glob(f"{name}-*/summary.json"))
        plain = self.path / "runs" / name
        done = [summary.parent for summary in measured if RunFolder(summary.parent).is_finished()]
        return done[0] if done and not RunFolder(plain).is_finished() else plain

    def task(self, config: RunConfig, label: str) -> Task:
        """A run of this sweep.

        Args:
            config: Resolved settings.
            label: What a user calls it.
        """
        return Task(config, self.folder_of(config), label)

    def is_done(self, task: Task) -> bool:
        """False for a run that cannot be read: training it again raises the reason.

        Args:
            task: A run of the sweep.
        """
        try:
            return RunFolder(task.folder).is_finished()
        except ValueError:
            return False

    def run(self, tasks: Sequence[Task], jobs: int = 1, watch: Watch = lambda _: None) -> None:
        """Train what is not finished. Failures are recorded and tried again by the next call.

        Args:
            tasks: The runs.
            jobs: Runs at once.
            watch: Called with every event.
        """
        todo = list({task.folder: task for task in tasks if not self.is_done(task)}.values())
        if not todo:
            return
        order.keep(self.path, [*order.read(self.path), *(f"runs/{task.folder.name}" for task in todo)])
        with (self.path / "log.txt").open("a", encoding="utf-8") as log:
            pool = Pool(min(jobs, len(todo)), log)
            with contextlib.closing(pool), handle_signals(pool.stop):
                for event in pool.work(todo):
                    self._record(event)
                    watch(event)
        if pool.stopped:
            raise Interrupted(pool.stopped)

    def _record(self, event: Event) -> None:
        name = event.task.folder.name
        if event.what == "failed":
            self.failed[name] = {"run": event.task.label, "why": event.why}
        elif event.what != "finished" or not self.failed.pop(name, None):
            return
        disk.write_json(self._failures, self.failed)


class Job:
    """One process of `fedlesam.runs.job`, in a session of its own: Ctrl-C reaches it only through the sweep.

    Args:
        log: Where what it prints goes.
    """

    def __init__(self, log: IO[str]) -> None:
        self.connection, other_end = multiprocessing.Pipe()
        with other_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedlesam.runs.job", str(other_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[other_end.fileno()],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.tasks: dict[int, Task] = {}
        """The runs under way, by their numbers in the messages."""

    def assign(self, tasks: Sequence[Task]) -> None:
        """Give the process runs to train together.

        Args:
            tasks: Runs of the sweep.
        """
        self.tasks = dict(enumerate(tasks))
        with contextlib.suppress(OSError):  # it died: whoever receives from it will see that
            self.connection.send([(task.config, task.folder) for task in tasks])

    def close(self) -> int:
        """Its exit code, once it has ended: without a connection it makes a checkpoint and ends."""
        self.connection.close()
        return self.process.wait()


class Pool:
    """The processes of a sweep, while it runs.

    Args:
        size: The most processes at once.
        log: Where what they print goes.
    """

    def __init__(self, size: int, log: IO[str]) -> None:
        self.size, self.log = size, log
        self.jobs: list[Job] = []
        self.stopped = 0

    def stop(self, signum: int) -> None:
        """Every run under way drops its round, makes a checkpoint and ends.

        Args:
            signum: The signal.
        """
        self.stopped = signum
        for job in list(self.jobs):
            with contextlib.suppress(OSError):
                job.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End all processes: an error in the sweep must not leave any behind."""
        for job in self.jobs:
            job.connection.close()
        for job in self.jobs:
            job.close()

    def work(self, tasks: Sequence[Task]) -> Iterator[Event]:
        """Train all of them, as many at once as there are processes; yields what happens.

        Args:
            tasks: The runs.
        """
        todo = [[tasks[i] for i in group] for group in companies([task.config for task in tasks], self.size)]
        while (todo and not self.stopped) or any(job.tasks for job in self.jobs):
            while todo and not self.stopped and (job := self._idle()) is not None:
                job.assign(todo.pop(0))
            ready = wait([job.connection for job in self.jobs], timeout=0.5)
            for job in [job for job in self.jobs if job.connection in ready]:
                yield from self._receive(job)

    def _idle(self) -> Job | None:
        """A process without a run; a new one while there are fewer than `size`."""
        idle = next((job for job in self.jobs if not job.tasks and job.process.poll() is None), None)
        if idle is None and len(self.jobs) < self.size:
            idle = Job(self.log)
            self.jobs.append(idle)
            if self.stopped:
                idle.process.send_signal(signal.SIGTERM)
        return idle

    def _receive(self, job: Job) -> Iterator[Event]:
        try:
            messages = [job.connection.recv()]
        except (EOFError, OSError):
            self.jobs.remove(job)
            code = job.close()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            why = f"its process ended with {how}; see log.txt"
            messages = [{"what": "interrupted", "task": number, "why": why} for number in job.tasks]
        for message in messages:
            number = message.pop("task")
            task = job.tasks[number] if message["what"] == "round" else job.tasks.pop(number)
            if message["what"] == "interrupted":  # by somebody else's signal to this process alone, or by the sweep
                message["what"] = "failed"
                if self.stopped:
                    continue
            yield Event(task, **message)

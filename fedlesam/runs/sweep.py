"""A queue of runs in one folder: equal runs once, several at a time; the same call again resumes it."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from fedlesam.core import disk
from fedlesam.core.names import file_name
from fedlesam.engines.signals import Interrupted, handle_signals
from fedlesam.runs import config as configs
from fedlesam.runs import lock
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder

FORM = 1
"""Of the folder. Another one is refused, and so is one of another version of the package: its numbers may be others."""
PATIENCE = 60.0
"""Seconds to wait for a run that another process holds: of a sweep that was killed, it is about to end."""


@dataclass(frozen=True)
class Task:
    """A run of a sweep."""

    config: RunConfig
    folder: Path
    label: str


@dataclass(frozen=True)
class Event:
    """What a run has just done."""

    task: Task
    what: str
    """round, finished or failed"""
    round: int = 0
    accuracy: float | None = None
    why: str = ""


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
        log: Where what they print goes.
    """

    def __init__(self, log: IO[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedlesam.runs.job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.task: Task | None = None
        self.rest = b""
        """The beginning of a line that is not complete yet."""

    def assign(self, task: Task) -> None:
        """Give the process a run to train.

        Args:
            task: A run of the sweep.
        """
        assert self.process.stdin is not None
        self.task = task
        with contextlib.suppress(OSError):  # it died: the reader will see that
            message = {"config": configs.as_table(task.config), "folder": str(task.folder)}
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def close_input(self) -> None:
        """The process ends at the end of its input, after a checkpoint."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self) -> int:
        """Its exit code, once it has ended."""
        self.close_input()
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


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
            job.close_input()
        for job in self.jobs:
            job.close()

    def work(self, tasks: Sequence[Task]) -> Iterator[Event]:
        """Train all of them, as many at once as there are processes; yields what happens.

        Args:
            tasks: The runs.
        """
        todo, waiting = list(tasks), {task.folder: time.monotonic() for task in tasks}
        with selectors.DefaultSelector() as selector:
            while (todo and not self.stopped) or any(job.task for job in self.jobs):
                idle = [job for job in self.jobs if job.task is None and job.process.poll() is None]
                while todo and not self.stopped and (idle or len(self.jobs) < self.size):
                    task = self._next(todo)
                    if task is None:
                        break
                    if why := self._why_held(task):
                        if time.monotonic() - waiting[task.folder] < PATIENCE:
                            break
                        todo.remove(task)
                        yield Event(task, "failed", why=why)
                        continue
                    todo.remove(task)
                    job = idle.pop() if idle else self._spawn(selector)
                    job.assign(task)
                for key, _ in selector.select(timeout=0.5):
                    yield from self._read(key.data, selector)

    def _next(self, todo: list[Task]) -> Task | None:
        """The first that no other process holds; if all are held, the first."""
        return next((task for task in todo if not self._why_held(task)), todo[0] if todo else None)

    def _why_held(self, task: Task) -> str:
        holder = lock.holder(task.folder)
        return "" if holder is None else f"{task.folder}: is in use by process {holder.get('pid', '?')}"

    def _spawn(self, selector: selectors.BaseSelector) -> Job:
        job = Job(self.log)
        assert job.process.stdout is not None
        self.jobs.append(job)
        selector.register(job.process.stdout, selectors.EVENT_READ, job)
        if self.stopped:
            job.process.send_signal(signal.SIGTERM)
        return job

    def _read(self, job: Job, selector: selectors.BaseSelector) -> Iterator[Event]:
        """The messages of a job; no buffered reading, which would keep lines from the selector."""
        out = job.process.stdout
        assert out is not None
        received = os.read(out.fileno(), 65536)
        if not received:
            selector.unregister(out)
            self.jobs.remove(job)
            yield from self._exited(job)
            return
        *lines, job.rest = (job.rest + received).split(b"\n")
        for line in lines:
            message, task = json.loads(line), job.task
            assert task is not None
            if "round" in message:
                yield Event(task, "round", message["round"], message["accuracy"])
                continue
            job.task = None
            if message["end"] != "interrupted":
                yield Event(task, message["end"], why=message.get("why", ""))
            elif not self.stopped:  # by somebody else's signal to this process alone
                yield Event(task, "failed", why="was interrupted; the same command resumes it")

    def _exited(self, job: Job) -> Iterator[Event]:
        code, task, job.task = job.close(), job.task, None
        if task is not None and not self.stopped:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            yield Event(task, "failed", why=f"its process ended with {how}; see log.txt")

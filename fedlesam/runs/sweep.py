"""A queue of runs in one folder: shared runs once, several at a time, and the same call again goes on with the rest."""

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

from fedlesam import config as configs
from fedlesam import disk, lock
from fedlesam.config import RunConfig
from fedlesam.interrupt import Interrupted, asked_to_stop
from fedlesam.names import file_name
from fedlesam.runs import RunFolder

FORM = 1
"""Of the folder. Another one is refused, and so is one of another version of the package: its numbers may be others."""
PATIENCE = 60.0
"""Seconds to wait for a run that another process holds: of a sweep that was killed, it is about to end."""


@dataclass(frozen=True)
class Task:
    config: RunConfig
    folder: Path
    label: str


@dataclass(frozen=True)
class Event:
    """What a run just did."""

    task: Task
    what: str
    """round, finished or failed"""
    round: int = 0
    accuracy: float | None = None
    why: str = ""


Watch = Callable[[Event], None]


class Sweep:
    """The folder: sweep.json, runs/, failed.json with what went wrong, log.txt with what the runs said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed: dict[str, dict[str, str]] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator["Sweep"]:
        """Hold the folder, as the only process; one of another version, or of something else, is refused."""
        here = {"form": FORM, "fedlesam": version("fedlesam")}
        self._check(here)
        self.path.mkdir(parents=True, exist_ok=True)
        with lock.locked(self.path):
            self._check(here)
            if not self._about.exists():
                disk.write_json(self._about, here)
            self._failed = json.loads(self._failures.read_text(encoding="utf-8")) if self._failures.exists() else {}
            yield self

    @property
    def _about(self) -> Path:
        return self.path / "sweep.json"

    @property
    def _failures(self) -> Path:
        return self.path / "failed.json"

    def _check(self, here: dict[str, Any]) -> None:
        if not self._about.exists():
            if self.path.exists() and not RunFolder(self.path).is_empty():
                raise ValueError(f"{self.path}: is not empty and not a sweep folder; choose another with --out")
            return
        try:
            there = json.loads(self._about.read_text(encoding="utf-8"))
            form, package = there["form"], there["fedlesam"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._about}: does not describe a sweep: {error}; choose another --out") from error
        if (form, package) != (here["form"], here["fedlesam"]):
            raise ValueError(
                f"{self.path}: was made by fedlesam {package} (folder form {form}), this is {here['fedlesam']} (form "
                f"{here['form']}), and their numbers are not mixed; choose another --out, or use fedlesam {package}"
            )

    @property
    def failed(self) -> dict[str, dict[str, str]]:
        """By the run's folder: its label and why it failed."""
        return dict(self._failed)

    def folder_of(self, config: RunConfig) -> Path:
        """Named by the content: the same settings are the same run, whoever asks for it.

        What is measured while training does not change the run. So one with probes serves also those who want none.
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
        return Task(config, self.folder_of(config), label)

    def is_done(self, task: Task) -> bool:
        """A run that cannot be read is not; training it again says what is wrong."""
        try:
            return RunFolder(task.folder).is_finished()
        except ValueError:
            return False

    def run(self, tasks: Sequence[Task], jobs: int = 1, watch: Watch = lambda _: None) -> None:
        """Do what is not done; what fails is noted, and tried again by the next call. Interrupted: nothing is lost."""
        todo = list({task.folder: task for task in tasks if not self.is_done(task)}.values())
        if not todo:
            return
        with (self.path / "log.txt").open("a", encoding="utf-8") as log:
            crew = Crew(min(jobs, len(todo)), log)
            with contextlib.closing(crew), asked_to_stop(crew.stop):
                for event in crew.work(todo):
                    self._note(event)
                    watch(event)
        if crew.stopped:
            raise Interrupted(crew.stopped)

    def _note(self, event: Event) -> None:
        name = event.task.folder.name
        if event.what == "failed":
            self._failed[name] = {"run": event.task.label, "why": event.why}
        elif event.what != "finished" or not self._failed.pop(name, None):
            return
        disk.write_json(self._failures, self._failed)


class Job:
    """One process of `fedlesam.runs.job`, in a session of its own: Ctrl-C reaches it only through the sweep."""

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
        """Of a line that has not come whole yet."""

    def give(self, task: Task) -> None:
        assert self.process.stdin is not None
        self.task = task
        with contextlib.suppress(OSError):  # it died: the reader will see that
            order = {"config": configs.as_table(task.config), "folder": str(task.folder)}
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def dismiss(self) -> None:
        """The end of its input is its end, after a checkpoint."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self) -> int:
        """Its exit code, once it has ended."""
        self.dismiss()
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Crew:
    """The jobs of a sweep, while it runs."""

    def __init__(self, size: int, log: IO[str]) -> None:
        self.size, self.log = size, log
        self.jobs: list[Job] = []
        self.stopped = 0

    def stop(self, signum: int) -> None:
        """Every run under way drops its round, makes a checkpoint and ends."""
        self.stopped = signum
        for job in list(self.jobs):
            with contextlib.suppress(OSError):
                job.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Ends what is still there: an error in the sweep must not leave processes behind."""
        for job in self.jobs:
            job.dismiss()
        for job in self.jobs:
            job.close()

    def work(self, tasks: Sequence[Task]) -> Iterator[Event]:
        todo, waiting = list(tasks), {task.folder: time.monotonic() for task in tasks}
        with selectors.DefaultSelector() as heard:
            while (todo and not self.stopped) or any(job.task for job in self.jobs):
                idle = [job for job in self.jobs if job.task is None and job.process.poll() is None]
                while todo and not self.stopped and (idle or len(self.jobs) < self.size):
                    task = self._next(todo)
                    if task is None:
                        break
                    if why := self._held(task):
                        if time.monotonic() - waiting[task.folder] < PATIENCE:
                            break
                        todo.remove(task)
                        yield Event(task, "failed", why=why)
                        continue
                    todo.remove(task)
                    job = idle.pop() if idle else self._hire(heard)
                    job.give(task)
                for key, _ in heard.select(timeout=0.5):
                    yield from self._hear(key.data, heard)

    def _next(self, todo: list[Task]) -> Task | None:
        """The first that nobody else works on; if all are worked on, the first."""
        return next((task for task in todo if not self._held(task)), todo[0] if todo else None)

    def _held(self, task: Task) -> str:
        holder = lock.holder(task.folder)
        return "" if holder is None else f"{task.folder}: is in use by process {holder.get('pid', '?')}"

    def _hire(self, heard: selectors.BaseSelector) -> Job:
        job = Job(self.log)
        assert job.process.stdout is not None
        self.jobs.append(job)
        heard.register(job.process.stdout, selectors.EVENT_READ, job)
        if self.stopped:
            job.process.send_signal(signal.SIGTERM)
        return job

    def _hear(self, job: Job, heard: selectors.BaseSelector) -> Iterator[Event]:
        """What a job said since; no buffered reading, which would keep lines from the selector."""
        out = job.process.stdout
        assert out is not None
        said = os.read(out.fileno(), 65536)
        if not said:
            heard.unregister(out)
            self.jobs.remove(job)
            yield from self._lost(job)
            return
        *lines, job.rest = (job.rest + said).split(b"\n")
        for line in lines:
            about, task = json.loads(line), job.task
            assert task is not None
            if "round" in about:
                yield Event(task, "round", about["round"], about["accuracy"])
                continue
            job.task = None
            if about["end"] != "interrupted":
                yield Event(task, about["end"], why=about.get("why", ""))
            elif not self.stopped:  # by somebody else's signal to this process alone
                yield Event(task, "failed", why="was interrupted; the same command goes on with it")

    def _lost(self, job: Job) -> Iterator[Event]:
        code, task, job.task = job.close(), job.task, None
        if task is not None and not self.stopped:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            yield Event(task, "failed", why=f"its process ended with {how}; see log.txt")

"""One progress display for a queue of runs: how much is done, what is under way, how long it will take."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from fedlesam.cli.show import SECONDS_BETWEEN_LINES, Display
from fedlesam.experiments.estimate import spoken
from fedlesam.experiments.sweep import Event, Task, Watch


class SweepDisplay:
    """A bar on a terminal, a line every ten seconds elsewhere; the unit is estimated work, not runs."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.progress: Progress | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator["SweepDisplay"]:
        if self.display.quiet or not self.display.console.is_terminal:
            yield self
            return
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.display.console) as self.progress:
            yield self
        self.progress = None

    def begin(self, tasks: Sequence[Task]) -> Watch:
        total = sum(task.weight for task in tasks)
        done: dict[str, float] = {}
        counts = {"finished": 0, "failed": 0}
        began, said = 0.0, time.monotonic()
        first: dict[str, float] = {}
        bar = self.progress.add_task("", total=total) if self.progress is not None else None

        def see(event: Event) -> None:
            nonlocal began, said
            began = began or time.monotonic() - 1e-3  # the first event: starting up says nothing about the speed
            name, task = str(event.task.folder), event.task
            share = min(1.0, event.round / task.config.rounds) if event.what == "round" else 1.0
            first.setdefault(name, max(0.0, share - 1 / task.config.rounds))  # what a checkpoint had done before
            done[name] = share * task.weight
            if event.what != "round":
                counts[event.what] += 1
                if event.what == "failed":
                    self.display.say(f"failed: {task.label}: {event.why}")
            worked = sum(done[n] for n in done) - sum(first[n] * w for n, w in weights.items() if n in first)
            speed = worked / max(1e-9, time.monotonic() - began)
            left = (total - sum(done.values())) / speed if speed > 0 else None
            text = f"{counts['finished']} of {len(tasks)} runs"
            text += f", {counts['failed']} failed" if counts["failed"] else ""
            text += f", about {spoken(left)} left" if left else ""
            text += f"; {task.label} {event.round}/{task.config.rounds}" if event.what == "round" else ""
            if self.progress is not None and bar is not None:
                self.progress.update(bar, completed=sum(done.values()), description=text)
            elif not self.display.quiet and time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                click.echo(text, err=True)

        weights = {str(task.folder): task.weight for task in tasks}
        return see

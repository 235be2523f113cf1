"""What a person sees while runs train: a bar on a terminal or in a notebook, elsewhere a line at intervals."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from fedlesam.runs.evaluated import TEST, Measure
from fedlesam.runs.notebook import NotebookBars
from fedlesam.runs.stopping import first_metric

if TYPE_CHECKING:
    from fedlesam.federation import Record

SECONDS_BETWEEN_LINES = 10.0


class Display:
    """A bar per task on a terminal or in a notebook; elsewhere a line every ten seconds; nothing if quiet.

    Args:
        quiet: Whether to print nothing but warnings.
        columns: What stands behind the bars  [how many of how many].
    """

    def __init__(self, quiet: bool, *columns: ProgressColumn) -> None:
        self.quiet, self.console, self.printed = quiet, Console(stderr=True), time.monotonic()
        self.progress: Progress | None = None
        self.notebook = NotebookBars() if self.console.is_jupyter and not quiet else None
        self._bars = 0
        if self.console.is_terminal and not self.console.is_jupyter and not quiet:
            name, state = TextColumn("{task.description:<12}"), TextColumn("{task.fields[state]}")
            layout = (SpinnerColumn(), name, BarColumn(), *(columns or (MofNCompleteColumn(),)), state)
            self.progress = Progress(*layout, TimeRemainingColumn(compact=True), console=self.console)

    @contextlib.contextmanager
    def open(self, out: Path | None = None, again: str = "command", anew: bool = False) -> Iterator["Display"]:
        """Show progress and warnings.

        Args:
            out: Where the results go, which an interrupt says.
            again: What resumes an interrupted run when it is repeated.
            anew: Whether it would replace the run.
        """
        log, handler = logging.getLogger("fedlesam"), LogHandler(self)
        before = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            with self.progress or contextlib.nullcontext():
                yield self
        except KeyboardInterrupt as error:
            if out is not None and out.exists():
                error.args = (f"{str(error) or 'interrupted'}; {_left(out, again + anew * ' without overwriting')}",)
            raise
        finally:
            log.removeHandler(handler)
            log.setLevel(before)

    def bar(self, name: str, total: int | None = None) -> "Tick":
        """What is called with how much is done, of how much, and what to show beside it; `last` is always shown.

        Args:
            name: The task.
            total: How much there is to do, if it is known.
        """
        bar = self.progress.add_task(name, total=total, state="") if self.progress is not None else None
        self._bars += 1
        number = self._bars
        if self.notebook is not None:
            self.notebook.update(number, name, 0, total, "")

        def tick(done: int, of: int | None = total, state: str | None = None, last: bool = False) -> None:
            if self.progress is not None and bar is not None:
                fields = {} if state is None else {"state": state}
                self.progress.update(bar, completed=done, total=of, **fields)  # type: ignore[arg-type]
            elif self.notebook is not None:
                self.notebook.update(number, name, done, of, state or "")
            elif not self.quiet and (last or time.monotonic() - self.printed > SECONDS_BETWEEN_LINES):
                self.printed = time.monotonic()
                click.echo(f"{name} {done:,}/{'?' if of is None else f'{of:,}'}  {state or ''}".strip(), err=True)

        return tick

    def watch(self, name: str, rounds: int, on: str = TEST) -> "Callable[[Record], None]":
        """The observer of one run, evaluated on test or held-out samples.

        Args:
            name: The run's, beside its bar.
            rounds: In total.
            on: `test` or `held-out`: the samples that it is evaluated on.
        """
        tick = self.bar(f"{name}  round" if self.notebook is None and self.progress is None else name, rounds)
        began, first = 0.0, -1

        def see(record: "Record") -> None:
            nonlocal began, first
            new = first < 0
            if new:  # what came before was loading: it says nothing about the rounds
                began, first = time.monotonic() - record.seconds, record.round
            left = (time.monotonic() - began) / (record.round + 1 - first) * (rounds - record.round - 1)
            state = describe(record, on) if first_metric(record) is not None or self.progress is None else None
            if self.progress is None and left:
                state = f"{state}  {format_duration(left)} left"
            tick(record.round + 1, rounds, state, last=new or record.round + 1 == rounds)

        return see

    def print(self, text: str) -> None:
        """Show a line, unless quiet.

        Args:
            text: The line; it is not read as markup.
        """
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _left(out: Path, again: str) -> str:
    """What an interrupted run left in its folder."""
    from fedlesam.runs.checkpoint import Checkpoints
    from fedlesam.runs.folder import RunFolder

    folder = RunFolder(out)
    found = Checkpoints(folder.checkpoints).rounds()
    with contextlib.suppress(OSError, ValueError):  # whoever reads the run says what is wrong
        if folder.is_finished() and found[:1] == [folder.read_config().rounds]:
            return f"all {found[0]} rounds of {out} are finished"
    what = f"the checkpoint after round {found[0]}" if found else "what was done"
    return f"{what} is in {out}: the same {again} resumes it"


class Tick(Protocol):
    """Called as work proceeds, with how much is done and how much there is."""

    def __call__(self, done: int, of: int | None = ..., state: str | None = ..., last: bool = ...) -> None: ...


class LogHandler(logging.Handler):
    """The package's log on the display; warnings also where it is quiet, `without_bar` where there is no bar.

    Args:
        display: Where messages are shown.
    """

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.display, self.bar = display, functools.cache(display.bar)

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "total"):
            self.bar(record.unit)(record.done, record.total)  # type: ignore[attr-defined]
        elif getattr(record, "without_bar", False) and (self.display.progress or self.display.notebook):
            return
        elif record.levelno >= logging.WARNING:
            self.display.console.print(f"warning: {record.getMessage()}", markup=False, highlight=False, soft_wrap=True)
        else:
            self.display.print(record.getMessage())


def describe(record: "Record", on: str = TEST) -> str:
    """The first metric, the training loss, and how many clients are missing.

    Args:
        record: Of the last round.
        on: `test` or `held-out`: the samples that it was evaluated on.
    """
    found, tested = first_metric(record), ""
    if found is not None:
        measure = Measure(found[0])
        tested = f"{on} {measure.title} {measure.show(found[1], 1)}{measure.unit}  "
    missing = f"  {len(record.dropped)} dropped" if record.dropped else ""
    return f"{tested}train loss {record.train_loss:.3f}{missing}"


def format_duration(seconds: float) -> str:
    """90 is `1 min 30 s`.

    Args:
        seconds: How long.
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"

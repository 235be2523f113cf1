"""What a person sees while runs train and when they are done. Colour and progress only on a terminal."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedlesam.runs.evaluated import TEST, Measure, scores_of, summary_measure

if TYPE_CHECKING:
    from fedlesam.federation import Record

SECONDS_BETWEEN_LINES = 10.0
WIDTH_IN_A_PIPE = 110


class Display:
    """A bar per task on a terminal; elsewhere a line every ten seconds; nothing if quiet.

    Args:
        quiet: Whether to print nothing but warnings.
        columns: What stands behind the bars  [how many of how many].
    """

    def __init__(self, quiet: bool, *columns: ProgressColumn) -> None:
        self.quiet, self.console, self.printed = quiet, Console(stderr=True), time.monotonic()
        self.progress: Progress | None = None
        if self.console.is_terminal and not quiet:
            name, state = TextColumn("{task.description:<12}"), TextColumn("{task.fields[state]}")
            layout = (SpinnerColumn(), name, BarColumn(), *(columns or (MofNCompleteColumn(),)), state)
            self.progress = Progress(*layout, TimeRemainingColumn(compact=True), console=self.console)

    @contextlib.contextmanager
    def open(self, out: Path | None = None) -> Iterator["Display"]:
        """Show progress and warnings.

        Args:
            out: Where the results go, which is printed on an interrupt.
        """
        log, handler = logging.getLogger("fedlesam"), LogHandler(self)
        before = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            with self.progress or contextlib.nullcontext():
                yield self
        except KeyboardInterrupt:
            if out is not None:
                self.say(f"interrupted: what was done is in {out}; the same command resumes it")
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

        def tick(done: int, of: int | None = total, state: str | None = None, last: bool = False) -> None:
            if self.progress is not None and bar is not None:
                fields = {} if state is None else {"state": state}
                self.progress.update(bar, completed=done, total=of, **fields)  # type: ignore[arg-type]
            elif not self.quiet and (last or time.monotonic() - self.printed > SECONDS_BETWEEN_LINES):
                self.printed = time.monotonic()
                click.echo(f"{name} {done:,}/{'?' if of is None else f'{of:,}'}  {state or ''}".strip(), err=True)

        return tick

    def watch(self, name: str, rounds: int, on: str = TEST) -> "Callable[[Record], None]":
        """The observer of one run, evaluated on test or held-out samples."""
        tick = self.bar(name if self.progress is not None else f"{name}  round", rounds)

        def see(record: "Record") -> None:
            state = describe(record, on) if record.test_loss is not None or self.progress is None else None
            tick(record.round + 1, rounds, state, last=record.round + 1 == rounds)

        return see

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Tick(Protocol):
    def __call__(self, done: int, of: int | None = ..., state: str | None = ..., last: bool = ...) -> None: ...


class LogHandler(logging.Handler):
    """The package's log on the display; warnings also where the display is quiet."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.display, self.bar = display, functools.cache(display.bar)

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "total"):
            self.bar(record.unit)(record.done, record.total)  # type: ignore[attr-defined]
        elif record.levelno >= logging.WARNING:
            self.display.console.print(f"warning: {record.getMessage()}", markup=False, highlight=False, soft_wrap=True)
        else:
            self.display.say(record.getMessage())


def describe(record: "Record", on: str = TEST) -> str:
    tested = ""
    if record.test_loss is not None:
        name, value = next(iter(record.metrics.items()), ("loss", record.test_loss))
        measure = Measure(name)
        tested = f"{on} {measure.title} {measure.show(value, 1)}{measure.unit}  "
    missing = f"  {len(record.dropped)} dropped" if record.dropped else ""
    return f"{tested}train loss {record.train_loss:.3f}{missing}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def format_duration(seconds: float) -> str:
    """90 is `1 min 30 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_scores(summary: dict[str, Any], on: str) -> None:
    """Of one run."""
    found, measure = scores_of(summary, ()), summary_measure(summary)
    names = (("last round", "last"), ("mean of the last evaluations", "mean_of_last"), ("best round", "best"))
    for name, key in names:
        if key in found:
            click.echo(f"{on} {measure.title}, {name}: {measure.show(found[key])}{measure.unit}")
    others = summary.get("metrics") or summary.get("held_out_metrics") or {}
    for name, value in others.items():
        if name != measure.name and value is not None:
            click.echo(f"{on} {Measure(name).title}, last evaluation: {Measure(name).show(value)}{Measure(name).unit}")
    found = dict(summary.get("per_client") or summary.get("held_out_per_client") or {})
    untested = found.pop("untested", 0)
    parts = [f"{name.replace('_', ' ')} {percent(value)} %" for name, value in found.items()]
    if untested:
        parts.append(f"{untested} clients dropped: none of their classes are evaluated")
    if parts:
        click.echo(f"{on} accuracy per client: {', '.join(parts)}")


def print_table(columns: list[str], rows: list[list[str]], numbers: Collection[str] = ()) -> None:
    """Print rows below the names of their columns.

    Args:
        columns: The names.
        rows: A cell for each.
        numbers: Columns that are set to the right.
    """
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH_IN_A_PIPE)).print(table)

"""What a person sees while runs train and when they are done. Colour and progress only on a terminal."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedlesam.runs.evaluated import TEST, accuracy_of

if TYPE_CHECKING:
    from fedlesam.federation import Record

SECONDS_BETWEEN_LINES = 10.0
WIDTH_IN_A_PIPE = 110


class Display:
    """One bar a run on a terminal; elsewhere a line every ten seconds; nothing if quiet."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        self.others: dict[str, TaskID] = {}
        self.said = time.monotonic()

    @contextlib.contextmanager
    def open(self) -> Iterator["Display"]:
        with self._listening():
            if self.quiet or not self.console.is_terminal:
                yield self
            else:
                with self._bars():
                    yield self

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        log, handler = logging.getLogger("fedlesam"), LogHandler(self)
        before = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(before)

    @contextlib.contextmanager
    def _bars(self) -> Iterator[None]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console) as self.progress:
            yield
        self.progress = None

    def watch(self, name: str, rounds: int, on: str = TEST) -> "Callable[[Record], None]":
        """The observer of one run, evaluated on test or held-out samples."""
        bar = self.progress.add_task(name, total=rounds, unit="rounds", state="") if self.progress is not None else None
        said = [time.monotonic()]

        def see(record: "Record") -> None:
            state = describe(record, on)
            if self.progress is not None and bar is not None:
                fields = {"state": state} if record.test_accuracy is not None else {}
                self.progress.update(bar, completed=record.round + 1, **fields)  # type: ignore[arg-type]
            elif not self.quiet and (time.monotonic() - said[0] > SECONDS_BETWEEN_LINES or record.round + 1 == rounds):
                said[0] = time.monotonic()
                click.echo(f"{name}  round {record.round + 1}/{rounds}  {state}", err=True)

        return see

    def advance(self, unit: str, done: int, total: int) -> None:
        """A bar of its own for what comes before the rounds; elsewhere a line every ten seconds."""
        if self.progress is None:
            if time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
                self.said = time.monotonic()
                self.say(f"{done:,} of {total:,} {unit}")
            return
        bar = self.others.get(unit)
        if bar is None:
            bar = self.others[unit] = self.progress.add_task("", total=total, unit=unit, state="")
        self.progress.update(bar, completed=done, total=total)

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LogHandler(logging.Handler):
    """The package's log on the display; warnings also where the display is quiet."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "total"):
            self.display.advance(record.unit, record.done, record.total)  # type: ignore[attr-defined]
        elif record.levelno >= logging.WARNING:
            self.display.console.print(f"warning: {record.getMessage()}", markup=False, highlight=False, soft_wrap=True)
        else:
            self.display.say(record.getMessage())


@contextlib.contextmanager
def bars(quiet: bool, *columns: ProgressColumn) -> Iterator[Callable[[str], Callable[[int, int | None], None]]]:
    """A bar per named task on a terminal; elsewhere a line every ten seconds; nothing if quiet.

    Args:
        quiet: Whether to print nothing.
        columns: What stands behind the bar  [how many of how many].
    """
    console, printed = Console(stderr=True), [time.monotonic()]

    def begin_lines(name: str) -> Callable[[int, int | None], None]:
        def tick(done: int, of: int | None) -> None:
            if not quiet and time.monotonic() - printed[0] > SECONDS_BETWEEN_LINES:
                printed[0] = time.monotonic()
                click.echo(f"{name}  {done}/{'?' if of is None else of}", err=True)

        return tick

    if quiet or not console.is_terminal:
        yield begin_lines
        return
    layout = (SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(), *(columns or (MofNCompleteColumn(),)))
    with Progress(*layout, TimeRemainingColumn(compact=True), console=console) as progress:

        def begin_bar(name: str) -> Callable[[int, int | None], None]:
            bar = progress.add_task(name, total=None)
            return lambda done, of: progress.update(bar, completed=done, total=of)

        yield begin_bar


def describe(record: "Record", on: str = TEST) -> str:
    tested = f"{on} accuracy {100 * record.test_accuracy:.1f} %  " if record.test_accuracy is not None else ""
    missing = f"  {len(record.dropped)} dropped" if record.dropped else ""
    return f"{tested}train loss {record.train_loss:.3f}{missing}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def format_duration(seconds: float) -> str:
    """90 is `1 min 30 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_accuracy(summary: dict[str, Any], on: str) -> None:
    """Of one run."""
    accuracy = accuracy_of(summary, ())
    names = (("last round", "last"), ("mean of the last evaluations", "mean_of_last"), ("best round", "best"))
    for name, key in names:
        if key in accuracy:
            click.echo(f"{on} accuracy, {name}: {percent(accuracy[key])} %")
    found = dict(summary.get("per_client") or summary.get("held_out_per_client") or {})
    untested = found.pop("untested", 0)
    parts = [f"{name.replace('_', ' ')} {percent(value)} %" for name, value in found.items()]
    if untested:
        parts.append(f"{untested} clients dropped: none of their classes are evaluated")
    if parts:
        click.echo(f"{on} accuracy per client: {', '.join(parts)}")


def wide_enough() -> Console:
    """A pipe has no width of its own."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_IN_A_PIPE)


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    wide_enough().print(table)

"""One progress bar for a queue of runs: how much is done, what is under way, how long it will take."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import click

from fedlesam.cli import FAILED
from fedlesam.cli.show import Display, format_duration
from fedlesam.runs.sweep import Event, Task, Watch


def watch_sweep(display: Display, tasks: Sequence[Task]) -> Watch:
    """A bar of the rounds that are left; returns the function that is called with every event.

    Args:
        display: An open one.
        tasks: The runs that are left.
    """
    total = sum(task.config.rounds for task in tasks)
    tick = display.bar("rounds", total)
    done: dict[Path, int] = {}
    resumed: dict[Path, int] = {}
    counts = {"finished": 0, "failed": 0}
    began, before = 0.0, 0
    if tasks:
        what = f"{len(tasks)} runs to train, {total:,} rounds; the next line comes after the first"
        logging.getLogger("fedlesam").info(what, extra={"without_bar": True})

    def see(event: Event) -> None:
        nonlocal began, before
        new = not began
        task, rounds = event.task, event.task.config.rounds
        done[task.folder] = min(rounds, event.round) if event.what == "round" else rounds
        resumed.setdefault(task.folder, max(0, done[task.folder] - 1))
        if event.what != "round":
            counts[event.what] += 1
            if event.what == "failed":
                display.print(f"failed: {task.label}: {event.why}")
        worked = sum(done.values()) - sum(resumed.values())
        if new:  # what came before was starting up: it says nothing about the speed
            began, before = time.monotonic(), worked
        spent = time.monotonic() - began
        left = (total - sum(done.values())) * spent / (worked - before) if worked > before else 0.0
        text = f"{counts['finished']} of {len(tasks)} runs"
        text += f", {counts['failed']} failed" if counts["failed"] else ""
        text += f", about {format_duration(left)} left" if left else ""
        text += f"; {task.label} {event.round}/{rounds}  {event.state}".rstrip() if event.what == "round" else ""
        tick(sum(done.values()), total, text, last=new or sum(done.values()) == total)

    return see


def print_failed(failed: dict[str, str]) -> int:
    """Print why runs failed, by their labels; the exit code.

    Args:
        failed: The reason of each, by label.
    """
    for label, why in failed.items():
        click.echo(f"failed: {label}: {why}", err=True)
    if failed:
        click.echo(f"{len(failed)} runs failed; the same command tries them again", err=True)
    return FAILED if failed else 0

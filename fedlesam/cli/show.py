"""What a person sees when runs are done. Colour only on a terminal."""

from collections.abc import Collection
from typing import Any, Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlesam.runs.evaluated import PARTS, Measure, over_clients, scores_of, summary_measure
from fedlesam.runs.progress import Display as Display
from fedlesam.runs.progress import describe as describe
from fedlesam.runs.progress import format_duration as format_duration

WIDTH_IN_A_PIPE = 110


def percent(value: float | None) -> str:
    """A share as a percentage with two decimals; a dash for None.

    Args:
        value: From 0 to 1.
    """
    return "-" if value is None else f"{100 * value:.2f}"


def print_scores(summary: dict[str, Any], on: str) -> None:
    """Of one run.

    Args:
        summary: What summary.json holds.
        on: `test` or `held-out`: the samples that it was evaluated on.
    """
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
    for name, own in (summary.get("test_clients") or {}).items():
        one = Measure(name)
        parts = [f"{PARTS[part]} {one.show(value)}{one.unit}" for part, value in over_clients(summary, one).items()]
        parts += (
            [f"{own['untested']} clients have none" if one.name == measure.name else ""] if own.get("untested") else []
        )
        click.echo(f"{one.title} on clients' own test samples: {', '.join(filter(None, parts))}")


def print_table(
    columns: list[str], rows: list[list[str]], numbers: Collection[str] = (), whole: Collection[str] = ()
) -> None:
    """Print rows below the names of their columns.

    Args:
        columns: The names.
        rows: A cell for each.
        numbers: Columns that are set to the right.
        whole: Columns that are never broken, for names to copy; a narrow terminal gets longer lines.
    """
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column in numbers else "left"
        table.add_column(column, overflow="fold", justify=justify, no_wrap=column in whole)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    width = console.width if console.is_terminal else WIDTH_IN_A_PIPE
    if whole:
        sizes = [max(map(len, (name, *cells))) for name, *cells in zip(columns, *rows, strict=True)]
        least = [size if name in whole else min(size, 9) for name, size in zip(columns, sizes, strict=True)]
        width = max(width, sum(least) + 2 * len(least))
    Console(width=width).print(table)

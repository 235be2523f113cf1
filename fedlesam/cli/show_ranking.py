"""The tables that a comparison prints."""

import click

from fedlesam.cli.show import print_table
from fedlesam.report.ranking import MEASURES, Row
from fedlesam.runs.evaluated import PARTS, TEST


def print_ranking(rows: list[Row], on: str = TEST) -> None:
    """Best first; costs beside FedAvg's, the field's unit, where it is among the methods.

    Args:
        rows: One for each method.
        on: `test` or `held-out`: the samples that runs were evaluated on.
    """
    numbers = ["last", "mean of last", "best", "backward passes", "MB sent", "seconds"]
    table, probed = [], any(row.sharpness is not None for row in rows)
    if probed:
        numbers.insert(3, "sharpness")
    base = next((row for row in rows if row.algorithm == "fedavg"), None)
    for place, row in enumerate(rows, 1):
        passes = f" {row.backward_passes / base.backward_passes:.1f}x" if base else ""
        sent = f" {row.megabytes / base.megabytes:.1f}x" if base else ""
        costs = f"{row.backward_passes:,.0f}{passes}", f"{row.megabytes:,.1f}{sent}", f"{row.seconds:.1f}"
        values = [_accuracy(row, measure) for measure in MEASURES]
        if probed:
            values.append("-" if row.sharpness is None else f"{row.sharpness.mean:.3g}")
        table.append([str(place), row.algorithm, row.numbers or "-", *values, *costs])
    print_table(["#", "method", "values", *numbers], table, ["#", *numbers])
    seeds, measure = max(row.seeds for row in rows), rows[0].measure
    what = f"{on.capitalize()} {measure.title}{' in %' if measure.percent else ''}"
    click.echo(
        f"\n{what}: of the last round, of the last 10 evaluations, of the best round."
        + (" Smaller is better." if measure.smaller else "")
        + (" x: times FedAvg." if base else "")
        + ("\nSharpness: how much the training loss rises within the probe's radius." if probed else "")
        + (f"\nMeans over {seeds} seeds; ± is the standard deviation over seeds." if seeds > 1 else "")
    )
    _print_clients(rows)


def _print_clients(rows: list[Row]) -> None:
    """The measure over clients, where they were tested on their own samples."""
    shown = [
        [
            row.algorithm,
            *(
                row.measure.show(row.clients.get(part))
                + (f" ± {row.measure.show(row.client_spreads[part])}" if part in row.client_spreads else "")
                for part in PARTS
            ),
        ]
        for row in rows
        if row.clients
    ]
    if shown:
        measure = rows[0].measure
        click.echo(f"\n{measure.title.capitalize()}{' in %' if measure.percent else ''} on clients' own test samples\n")
        print_table(["method", *PARTS.values()], shown, list(PARTS.values()))


def print_gains(rows: list[Row], first: str) -> None:
    """Differences from the first method, paired by seed; nothing where there are none.

    Args:
        rows: One for each method.
        first: The name of the first method.
    """
    shown = [
        [
            row.algorithm,
            *(
                "-"
                if (gain := row.gains.get(name)) is None
                else "{:+{f}} [{:+{f}}, {:+{f}}]".format(
                    *(row.measure.scale * end for end in (gain.mean, gain.low, gain.high)),
                    f=".2f" if row.measure.percent else ".4g",
                )
                for name in MEASURES
            ),
        ]
        for row in rows
        if row.gains
    ]
    if shown:
        measure = rows[0].measure
        what = "Points" if measure.percent else f"Difference of {measure.title}"
        note = " Below 0 is better." if measure.smaller else ""
        click.echo(f"\n{what} over {first}, paired by seed: mean and 95 % t-interval.{note}\n")
        print_table(["method", "last", "mean of last", "best"], shown)


def _accuracy(row: Row, measure: str) -> str:
    spread = row.spreads.get(measure)
    return row.measure.show(getattr(row, measure)) + (f" ± {row.measure.show(spread)}" if spread is not None else "")

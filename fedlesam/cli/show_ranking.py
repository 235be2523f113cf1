"""The tables that a comparison prints."""

import click

from fedlesam.cli.show import percent, print_table
from fedlesam.report.ranking import MEASURES, Row
from fedlesam.runs.evaluated import TEST


def print_ranking(rows: list[Row], on: str = TEST) -> None:
    """Best first; costs beside FedAvg's, the field's unit, where it is among the methods."""
    numbers = ["last", "mean of last", "best", "backward passes", "MB sent", "seconds"]
    table = []
    base = next((row for row in rows if row.algorithm == "fedavg"), None)
    for place, row in enumerate(rows, 1):
        passes = f" {row.backward_passes / base.backward_passes:.1f}x" if base and base.backward_passes else ""
        sent = f" {row.megabytes / base.megabytes:.1f}x" if base else ""
        costs = f"{row.backward_passes:,.0f}{passes}", f"{row.megabytes:,.1f}{sent}", f"{row.seconds:.1f}"
        table.append([str(place), row.algorithm, *(_accuracy(row, measure) for measure in MEASURES), *costs])
    print_table(["#", "method", *numbers], table, ["#", *numbers])
    seeds = max(row.seeds for row in rows)
    click.echo(
        f"\n{on.capitalize()} accuracy in %: of the last round, of the last 10 evaluations, of the best round."
        + (" x: times FedAvg." if base else "")
        + (f"\nMeans over {seeds} seeds; ± is the standard deviation over seeds." if seeds > 1 else "")
    )


def print_gains(rows: list[Row], first: str) -> None:
    """Differences from the first method, paired by seed; nothing where there are none."""
    shown = [
        [
            row.algorithm,
            *(
                "-"
                if (gain := row.gains.get(name)) is None
                else f"{100 * gain.mean:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
                for name in MEASURES
            ),
        ]
        for row in rows
        if row.gains
    ]
    if shown:
        click.echo(f"\nPoints over {first}, paired by seed: mean and 95 % t-interval.\n")
        print_table(["method", "last", "mean of last", "best"], shown)


def _accuracy(row: Row, measure: str) -> str:
    spread = row.spreads.get(measure)
    return percent(getattr(row, measure)) + (f" ± {100 * spread:.2f}" if spread is not None else "")

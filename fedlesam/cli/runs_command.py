"""fedlesam runs"""

import dataclasses
import json
from pathlib import Path

import click

from fedlesam.cli.options import grouped_command, json_option


@grouped_command(
    "runs",
    "fedlesam runs",
    "fedlesam runs runs/rho --json",
)
@click.argument("folder", type=click.Path(path_type=Path), default="runs", metavar="[DIR]")
@json_option
def command(folder: Path, as_json: bool) -> None:
    """All runs in a folder [runs] and the folders in it: what state they are in, how far they are, what they reached.

    running: a process works on it, with the time it will still take. interrupted: by Ctrl-C or a kill; its command
    resumes it. stopped: by an error. The accuracy is of the last evaluation, of test data or of training samples
    held out, with its round where that is not the last one done. Checkpoints are what an unfinished run keeps on disk
    to resume from.
    """
    from fedlesam.cli.show import format_duration, print_table
    from fedlesam.runs.evaluated import Measure
    from fedlesam.runs.overview import find_runs

    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder; name the one that holds your runs")
    found = list(find_runs(folder))
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(run), "path": str(run.path)} for run in found]))
        return
    if not found:
        click.echo(f"{folder}: no runs here")
        return
    alone = all(run.measure == "accuracy" for run in found)
    columns = [
        "run",
        "method",
        "state",
        "round",
        "accuracy %" if alone else "measure",
        "of",
        "time left",
        "checkpoints",
    ]
    rows = []
    for run in found:
        name = str(run.path.relative_to(folder)) if run.path != folder else run.path.name
        state = run.state if not run.why else f"{run.state}: {run.why}"
        rounds = f"{run.round}/{run.rounds}" if run.rounds else str(run.round)
        size = f"{run.checkpoint_bytes / 1e6:.1f} MB" if run.checkpoint_bytes else "-"
        left = "-" if run.seconds_left is None else format_duration(run.seconds_left)
        at = "" if run.accuracy_round in (None, run.round) else f", round {run.accuracy_round}"
        measure = Measure(run.measure)
        score = measure.show(run.score) if alone else f"{measure.title} {measure.show(run.score)}{measure.unit}"
        rows.append([name, run.algorithm, state, rounds, score, run.evaluated_on + at, left, size])
    print_table(columns, rows)
    click.echo(f"\n{'Accuracy' if alone else 'Measure'}: of the last evaluation.")

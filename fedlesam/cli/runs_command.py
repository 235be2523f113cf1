"""fedlesam runs"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedlesam.cli.options import grouped_command, json_option, option

if TYPE_CHECKING:
    from fedlesam.runs.overview import Folded, Overview

SORTS = ("name", "newest", "score")


@grouped_command(
    "runs",
    "fedlesam runs",
    "fedlesam runs --sort newest",
    "fedlesam runs runs/rho --sort score",
    "fedlesam runs --all --json",
)
@click.argument("folder", type=click.Path(path_type=Path), default="runs", metavar="[DIR]")
@option("--sort", type=click.Choice(SORTS), default="name", help="by name, newest first, or best score first  [name]")
@option(
    "--all", "everything", is_flag=True, help="list every run of a comparison or sweep, not one line for all of them"
)
@json_option
def command(folder: Path, sort: str, everything: bool, as_json: bool) -> None:
    """List the runs in a folder [runs] and below it: state, progress, accuracy.

    A running run has a process that works on it; the time left is shown. One that was interrupted, by Ctrl-C or a kill,
    is resumed by its command. One that stopped ended with an error. The runs of a comparison or a sweep are one line
    with the best of them; give its folder to see each. The accuracy is that of the last evaluation, on test data or on
    held-out training samples, with its round if more rounds followed. Checkpoints are the bytes on disk from which a
    run can be resumed.
    """
    from fedlesam.cli.show import print_table
    from fedlesam.runs.overview import Folded, Overview, find_runs, fold

    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder; name the one that holds your runs")
    found = list(find_runs(folder))
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(run), "path": str(run.path)} for run in found]))
        return
    if not found:
        click.echo(f"{folder}: no runs here")
        return
    lines: list[Overview | Folded] = [*found] if everything else fold(found, folder)
    if sort == "newest":
        lines.sort(key=lambda line: -line.changed)
    elif sort == "score":
        lines.sort(key=_badness)
    alone = all(run.measure == "accuracy" for run in found)
    score = "accuracy %" if alone else "measure"
    columns = ["run", "method", "state", "round", score, "of", "time left", "checkpoints"]
    print_table(
        columns, [_cells(line, folder, alone) for line in lines], whole=[name for name in columns if name != "state"]
    )
    folded = any(isinstance(line, Folded) for line in lines)
    more = f" Several runs: the best of them; see each with `fedlesam runs {folder}/NAME` or --all." if folded else ""
    click.echo(f"\n{'Accuracy' if alone else 'Measure'}: of the last evaluation.{more}")


def _cells(line: "Overview | Folded", folder: Path, alone: bool) -> list[str]:
    from fedlesam.cli.show import format_duration
    from fedlesam.core.space import size
    from fedlesam.runs.evaluated import Measure
    from fedlesam.runs.overview import Folded

    name = str(line.path.relative_to(folder)) if line.path != folder else line.path.name
    runs = line.runs if isinstance(line, Folded) else [line]
    best = line.best if isinstance(line, Folded) else line
    kept = sum(run.checkpoint_bytes for run in runs)
    left = max((run.seconds_left for run in runs if run.seconds_left is not None), default=None)
    done, total = (sum(getattr(run, what) for run in runs) for what in ("round", "rounds"))
    score, of = "-", ""
    if best is not None:
        measure, at = Measure(best.measure), best.accuracy_round
        score = measure.show(best.score) if alone else f"{measure.title} {measure.show(best.score)}{measure.unit}"
        of = best.evaluated_on + ("" if at in (None, best.round) else f", round {at}")
    if isinstance(line, Folded):
        few = line.methods if len(line.methods) <= 3 else [f"{len(line.methods)} methods"]
        method, state = f"{', '.join(few)}; {len(runs)} runs", line.state
        of += f" of {best.algorithm}" if best is not None and len(line.methods) > 1 else ""
    else:
        method, state = line.algorithm, f"{line.state}: {line.why}" if line.why else line.state
    rest = ["-" if left is None else format_duration(left), size(kept) if kept else "-"]
    return [name, method, state, f"{done}/{total}" if total else str(done), score, of, *rest]


def _badness(line: "Overview | Folded") -> tuple[str, bool, float]:
    """Best first, each measure by itself."""
    from fedlesam.runs.overview import Folded

    best = line.best if isinstance(line, Folded) else line
    if best is None or best.score is None:
        return "~", True, 0.0
    return best.measure, False, best.score if best.smaller else -best.score

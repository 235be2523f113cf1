"""fedlesam probe"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedlesam.cli.options import PROBE, folder, grouped_command, json_option, option, quiet_option

if TYPE_CHECKING:
    from fedlesam.runs.measure import Measured

WHAT = "What to measure"
HIDDEN = ("run", "missing")
"""Columns of the files that have no room on a terminal."""
SIDE_BY_SIDE = 4
"""So many runs have room beside each other on a terminal."""


@grouped_command(
    "probe",
    "fedlesam probe runs/x",
    "fedlesam probe runs/x runs/y --probe sharpness:radius=0.05,steps=20,samples=0 --probe hessian:k=5",
    "fedlesam probe runs/cmp/*-seed0 --probe surface:dims=2,points=25,span=1 --figures figures",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@option(
    "--probe",
    "probes",
    group=WHAT,
    multiple=True,
    metavar=PROBE,
    help="sharpness, hessian, surface, drift or estimate; may be repeated  [sharpness]",
)
@option("--data-dir", group=WHAT, metavar="DIR", help="where the data set's files are, if they have moved")
@option("--device", group=WHAT, metavar="NAME", help="cpu, cuda or cuda:i  [the run's device]")
@folder("--figures", "where the surfaces' pictures go  [beside the runs]")
@folder("--tables", "also every table as CSV, Markdown and LaTeX, with a row for each run")
@quiet_option
@json_option
def command(
    runs: tuple[str, ...],
    probes: tuple[str, ...],
    data_dir: str | None,
    device: str | None,
    figures: Path | None,
    tables: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure runs with the same settings, finished or at their last checkpoint; write the numbers into their folders.

    \b
    sharpness  how far the global loss can rise within a radius: first-order and by
               projected gradient ascent, raw and scale-invariant, and each client's own
               [radius=0.1,relative=0.5,steps=10,samples=1000,local=yes,trained=yes,each=no]
    hessian    the k largest eigenvalues of the loss's Hessian, and its trace
               [k=3,draws=20,samples=1000]
    surface    the loss along one or two random directions, the same for all runs;
               a repeated command resumes an interrupted measurement
               [dims=2,points=25,span=1.0,samples=1000,seed=0]
    drift      how far clients' perturbations point away from the global one, in the
               round after the last checkpoint  [samples=1000,full=yes]
    estimate   the cosine of FedLESAM's estimate and the global gradient, at the last
               checkpoint  [samples=1000]

    `samples` is the approximate number of training samples, with the same number from each client; 0 uses all. Numbers
    go to RUN/probes.jsonl and RUN/surface-2d.safetensors. Drift, estimate and sharpness of trained clients need the
    clients' memories, which are in the last checkpoint. To see them over time: `fedlesam run --probe drift:every=10`.
    A centralised run (split pooled) that is given together with federated runs is measured on their clients.
    """
    from fedlesam.cli.show import Display
    from fedlesam.report import measured
    from fedlesam.report.write import write_tables
    from fedlesam.runs.measure import measure

    paths = [Path(run) for run in runs]
    with Display(quiet or as_json).open() as display:
        found = measure(
            paths,
            probes or ("sharpness",),
            data_dir=data_dir,
            device=device,
            progress=lambda path, probe: display.bar(f"{path.name} {probe}"),
        )
    pictures = measured.draw(found, figures or Path(os.path.commonpath([path.resolve() for path in paths])))
    if tables is not None:
        write_tables([table for table, _ in measured.tables(found)], tables)
    if as_json:
        click.echo(json.dumps({"readings": _lines(found), "pictures": [str(picture) for picture in pictures]}))
    elif not quiet:
        _show(found)
        for picture in pictures:
            click.echo(f"picture: {picture}")
        if tables is not None:
            click.echo(f"tables: {tables}")


def _lines(found: "list[Measured]") -> list[dict[str, Any]]:
    from fedlesam.report.measured import names

    method = names(found)
    return [
        {
            "run": str(one.run),
            "method": method[one.run],
            **(one.reading.as_dict() if one.reading is not None else {"probe": one.probe, "file": str(one.file)}),
        }
        for one in found
    ]


def _show(found: "list[Measured]") -> None:
    """A column a run, or a row a run where there are many."""
    from fedlesam.cli.show import print_table
    from fedlesam.report import measured

    method = measured.names(found)
    for table, of_table in measured.tables(found):
        click.echo(table.title)
        heads = [column.name for column in table.columns]
        cells = [heads, *table.shown()]
        kept = [[cell for head, cell in zip(heads, row, strict=True) if head not in HIDDEN] for row in cells]
        if len(of_table) <= SIDE_BY_SIDE:
            kept = [list(column) for column in zip(*kept, strict=True)]
        else:
            kept[0] = [head.replace("_", " ") for head in kept[0]]
        print_table(["" if head == "method" else head for head in kept[0]], kept[1:])
        readings = {method[one.run]: one.reading for one in of_table if one.reading is not None}
        for on in dict.fromkeys(r.metadata["clients"] for r in readings.values() if "clients" in r.metadata):
            who = ", ".join(name for name, r in readings.items() if r.metadata.get("clients") == on)
            click.echo(f"{who}: on the clients of the others, {on}")
        for name, r in readings.items():
            if r.missing:
                what = "missing" if r.values else "measured nothing"
                click.echo(f"{name}, round {r.round}, {r.probe} {what}: {r.missing}")
        click.echo("")
    for one in found:
        if one.file is not None:
            click.echo(f"surface: {one.file}")

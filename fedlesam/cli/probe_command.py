"""fedlesam probe"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedlesam.cli.options import OUTPUT, Grouped, GroupedCommand

if TYPE_CHECKING:
    from fedlesam.algorithms import Algorithm
    from fedlesam.report.tables import Cell, Table
    from fedlesam.runs.config import RunConfig

    Measured = tuple[Table, list[dict[str, Any]]]

WHAT = "What to measure"
SIDE_BY_SIDE = 4
"""So many runs have room beside each other on a terminal."""


@click.command(
    "probe",
    cls=GroupedCommand,
    short_help="sharpness, curvature, drift and loss surface of runs",
    examples=(
        "fedlesam probe runs/x",
        "fedlesam probe runs/x runs/y --probe sharpness:radius=0.05,steps=20,samples=0 --probe hessian:k=5",
        "fedlesam probe runs/cmp/*-seed0 --probe surface:dims=2,points=25,span=1 --figures figures",
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--probe",
    "probes",
    cls=Grouped,
    group=WHAT,
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="sharpness, hessian, surface, drift or estimate; may be repeated  [sharpness]",
)
@click.option(
    "--data-dir", cls=Grouped, group=WHAT, metavar="DIR", help="where the data set's files are, if not where they were"
)
@click.option("--device", cls=Grouped, group=WHAT, metavar="NAME", help="cpu, cuda or cuda:i, if not the run's")
@click.option(
    "--figures",
    cls=Grouped,
    group=OUTPUT,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="where the surfaces' pictures go  [beside the runs]",
)
@click.option(
    "--tables",
    cls=Grouped,
    group=OUTPUT,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="also every table as CSV, Markdown and LaTeX, a row a run",
)
@click.option("--quiet", "-q", cls=Grouped, group=OUTPUT, is_flag=True, help="no progress and no table")
@click.option("--json", "as_json", cls=Grouped, group=OUTPUT, is_flag=True, help="print the numbers, for scripts")
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
    """Measure runs, finished or at their last checkpoint, all in the same way; write the numbers into their folders.

    \b
    sharpness  how far the global loss can rise within a radius: first-order and by
               projected gradient ascent, raw and scale-invariant, and each client's own
               [radius=0.1,relative=0.5,steps=10,samples=1000,local=yes,trained=yes,each=no]
    hessian    its k largest eigenvalues and the trace
               [k=3,draws=20,samples=1000]
    surface    the loss along one or two random directions, the same for all runs;
               stopped and repeated, it resumes
               [dims=2,points=25,span=1.0,samples=1000,seed=0]
    drift      of an unfinished run: how far clients' perturbations point from the global one
               in the round after its last checkpoint  [samples=1000,full=yes]
    estimate   of an unfinished run: the cosine of FedLESAM's estimate and the global gradient
               [samples=1000]

    `samples` is about how many training samples are used, as many of each client; 0 takes all. Numbers go to
    RUN/probes.jsonl and RUN/surface-2d.safetensors. Drift, estimate and sharpness of trained clients need what clients
    remember, which a finished run has no more: measure them while training, with `fedlesam run --probe drift:every=10`.
    Centralised training (split pooled) named beside federated runs is measured on their clients.
    """
    from fedlesam.probes.catalogue import parse_offline

    wanted = [parse_offline(text) for text in probes or ("sharpness",)]
    _measure([Path(run) for run in runs], wanted, data_dir, device, figures, tables, quiet, as_json)


def _measure(
    paths: list[Path],
    wanted: list[Any],
    data_dir: str | None,
    device: str | None,
    figures: Path | None,
    tables: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    from fedlesam.probes.base import Look, beside, every_or
    from fedlesam.probes.during import take
    from fedlesam.probes.loss import GlobalLoss
    from fedlesam.probes.surface import Grid, path_of, surface_of
    from fedlesam.runs.build import load_data
    from fedlesam.runs.folder import RunFolder
    from fedlesam.runs.reopen import moved, open_between_rounds, open_run, read_config

    configs = {path: read_config(path, data_dir, device) for path in dict.fromkeys(paths)}
    _check_unfinished(list(configs), wanted)
    names, hosts = _names(configs), _hosts(configs)
    data, loaded = None, None
    found: list[dict[str, Any]] = []
    shapes: dict[int, str] = {}
    with _progress(quiet or as_json, len(configs) * len(wanted)) as begin:
        for path, config in configs.items():
            source = (config.data, config.data_dir, config.samples, config.held_out)
            if data is None or source != loaded:
                data, loaded = load_data(config), source
            between = _between_rounds(path, wanted)
            look = open_between_rounds(path, config, data) if between else Look(open_run(path, config, data))
            look, host, on = dataclasses.replace(look, trains_on=between), hosts.get(path), {}
            if host is not None:
                look = Look(moved(open_run(host, configs[host], data), look.federation), trains_on=False)
                on = {"clients": f"those of {host.name}"}
            federation = look.federation
            for number, probe in enumerate(wanted):
                line: dict[str, Any] = {"run": str(path), "method": names[path], "asked": number}
                if isinstance(probe, Grid):
                    shapes[federation.state.weights.numel()] = str(path)
                    _same_model(shapes)
                    metadata = {
                        "algorithm": config.algorithm,
                        "seed": config.seed,
                        "rounds": federation.state.round,
                        **on,
                    }
                    loss = GlobalLoss.of(federation, every_or(probe.samples))
                    file, tick = path_of(path, probe.dims), begin(f"{names[path]} surface")
                    with beside(federation):
                        surface_of(loss, federation.state.weights, probe, file, metadata, tick)
                    found.append({**line, "probe": "surface", "file": str(file), "dims": probe.dims})
                elif _leaves_out(probe, federation.algorithm, host, len(configs)):
                    continue
                else:
                    probe.check(federation)
                    shown = dataclasses.replace(look, tick=begin(f"{names[path]} {probe.name}"))
                    reading = take(probe, shown, RunFolder(path).probes, on)
                    found.append({**line, **reading.as_dict()})
    pictures = _draw(found, figures or Path(os.path.commonpath([path.resolve() for path in configs])))
    measured = _tables(found)
    if tables is not None:
        from fedlesam.report.write import write_tables

        write_tables([table for table, _ in measured], tables)
    if as_json:
        lines = [{key: value for key, value in line.items() if key not in ("asked", "dims")} for line in found]
        click.echo(json.dumps({"readings": lines, "pictures": [str(picture) for picture in pictures]}))
    elif not quiet:
        _show(found, measured, tables, pictures)


def _between_rounds(path: Path, wanted: list[Any]) -> bool:
    """Whether to take up what clients remember: all of it is read, so only where it is there and of use."""
    from fedlesam.runs.checkpoint import Checkpoints
    from fedlesam.runs.folder import RunFolder

    folder = RunFolder(path)
    if folder.is_finished():
        return False
    if any(not getattr(probe, "at_end", True) for probe in wanted):
        return True
    of_use = any(getattr(probe, "reads_memories", False) for probe in wanted)
    return of_use and bool(Checkpoints(folder.checkpoints).found())


def _leaves_out(probe: Any, algorithm: "Algorithm", host: Path | None, runs: int) -> bool:
    """Among several runs: drift of a method that does not perturb, and what is of no centralised training."""
    from fedlesam.probes.drift import perturbs

    return not probe.at_end and (host is not None or (probe.name == "drift" and runs > 1 and not perturbs(algorithm)))


def _check_unfinished(paths: list[Path], wanted: list[Any]) -> None:
    """Before anything is measured."""
    from fedlesam.runs.folder import RunFolder

    for probe in wanted:
        finished = [path for path in paths if RunFolder(path).is_finished()]
        if finished and not getattr(probe, "at_end", True):
            raise ValueError(
                f"{finished[0]}: {probe.name} is of a round to come and of what clients remember, and this run is "
                f"finished, its checkpoints are gone; measure it while training, with `fedlesam run --probe "
                f"{probe.name}:every=10`, or of an unfinished run at its last checkpoint"
            )


def _hosts(configs: "dict[Path, RunConfig]") -> dict[Path, Path]:
    """For centralised training beside federated runs, the run on whose clients it is measured: the same samples."""
    from fedlesam.runs.methods import is_centralised, method_name

    alone = {path for path, c in configs.items() if is_centralised(method_name(c.algorithm, c.split))}
    hosts = {}
    for path in alone:
        mine = configs[path]
        same = ("data", "data_dir", "samples", "held_out", "model")
        like = [
            other
            for other, theirs in configs.items()
            if other not in alone and all(getattr(mine, name) == getattr(theirs, name) for name in same)
        ]
        if like:
            hosts[path] = min(like, key=lambda other: configs[other].seed != mine.seed)
    return hosts


def _draw(found: list[dict[str, Any]], folder: Path) -> list[Path]:
    lines = [line for line in found if "file" in line]
    if not lines:
        return []
    from fedlesam.report import surfaces
    from fedlesam.report.style import looks
    from fedlesam.runs.read import read_run

    runs = {line["run"]: read_run(Path(line["run"])) for line in lines}
    style = dict(zip(runs, looks([run.method for run in runs.values()]), strict=True))
    drawn = []
    for line in lines:
        surface = runs[line["run"]].surface(line["dims"])
        assert surface is not None
        drawn.append((line["method"], style[line["run"]], surface))
    return surfaces.draw(drawn, folder)


def _tables(found: list[dict[str, Any]]) -> "list[Measured]":
    """A table a probe that was asked for, a row a run; with the readings it is made of."""
    from fedlesam.report.tables import Column, Table

    tables: list[Measured] = []
    for asked in dict.fromkeys(line["asked"] for line in found if "values" in line):
        lines = [line for line in found if line["asked"] == asked and "values" in line]
        probe = lines[0]["probe"]
        names = list(dict.fromkeys(name for line in lines for name in line["values"]))
        same = {k: v for k, v in lines[0]["metadata"].items() if all(line["metadata"].get(k) == v for line in lines)}
        told = ", ".join(f"{k} {v}" for k, v in same.items() if not isinstance(v, bool) and k != "clients")
        again = sum(others[0]["probe"] == probe for _, others in tables)
        gaps = any("missing" in line for line in lines)
        rows: list[list[Cell]] = [
            [line["method"], line["run"], line["round"], *(line["values"].get(name) for name in names), line["seconds"]]
            + ([line.get("missing", "")] if gaps else [])
            for line in lines
        ]
        columns = [Column("method"), Column("run"), Column("round", _number)]
        columns += [Column(name, _number) for name in (*names, "seconds")]
        columns += [Column("missing")] if gaps else []
        key = f"{probe}-{again + 1}" if again else probe
        tables.append((Table(key, f"{probe}, {told}", columns, rows), lines))
    return tables


def _same_model(shapes: dict[int, str]) -> None:
    if len(shapes) > 1:
        (one, there), (other, here) = list(shapes.items())[:2]
        raise ValueError(
            f"surface: {there} has {one:,} parameters and {here} has {other:,}: directions can be shared only by runs "
            "of the same model; call it for each model alone"
        )


def _names(configs: "dict[Path, RunConfig]") -> dict[Path, str]:
    """As in a report; the seed where there are several, and the folder's name where that is not enough."""
    from fedlesam.report.groups import labels

    found = [label.split(" #")[0] for label in labels(list(configs.values()))]
    seeds = [config.seed for config in configs.values()]
    if len(set(seeds)) > 1:
        found = [f"{name} seed {seed}" for name, seed in zip(found, seeds, strict=True)]
    return {
        path: name if found.count(name) == 1 else f"{name} {path.name}"
        for path, name in zip(configs, found, strict=True)
    }


def _show(
    found: list[dict[str, Any]],
    measured: "list[Measured]",
    tables: Path | None,
    pictures: list[Path],
) -> None:
    """A column a run, or a row a run where there are many."""
    from fedlesam.cli.show import print_table

    for table, lines in measured:
        click.echo(table.title)
        heads = [column.name for column in table.columns]
        cells = [heads, *table.shown()]
        without = [
            [cell for head, cell in zip(heads, row, strict=True) if head not in ("run", "missing")] for row in cells
        ]
        if len(lines) <= SIDE_BY_SIDE:
            without = [list(column) for column in zip(*without, strict=True)]
        else:
            without[0] = [head.replace("_", " ") for head in without[0]]
        print_table(["" if head == "method" else head for head in without[0]], without[1:])
        for on in dict.fromkeys(line["metadata"]["clients"] for line in lines if "clients" in line["metadata"]):
            who = ", ".join(line["method"] for line in lines if line["metadata"].get("clients") == on)
            click.echo(f"{who}: on the clients of the others, {on}")
        for line in lines:
            if "missing" in line:
                what = "missing" if line["values"] else "reads nothing"
                click.echo(f"{line['method']}, round {line['round']}, {line['probe']} {what}: {line['missing']}")
        click.echo("")
    for line in found:
        if "file" in line:
            click.echo(f"surface: {line['file']}")
    for picture in pictures:
        click.echo(f"picture: {picture}")
    if tables is not None:
        click.echo(f"tables: {tables}")


def _number(value: float) -> str:
    return f"{value:.5g}"


@contextlib.contextmanager
def _progress(quiet: bool, parts: int) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar for what is being measured, on a terminal; a line every ten seconds elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from fedlesam.cli.show import SECONDS_BETWEEN_LINES

    console, said, count = Console(stderr=True), [time.monotonic()], [0]
    if quiet or not console.is_terminal:

        def begin_line(name: str) -> Callable[[int, int], None]:
            count[0] += 1
            number = count[0]

            def tick(done: int, of: int) -> None:
                if not quiet and time.monotonic() - said[0] > SECONDS_BETWEEN_LINES:
                    said[0] = time.monotonic()
                    click.echo(f"{number}/{parts}  {name}  {done}/{of}", err=True)

            return tick

        yield begin_line
        return
    bars = (SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    with Progress(*bars, TimeRemainingColumn(compact=True), console=console) as progress:

        def begin_bar(name: str) -> Callable[[int, int], None]:
            bar = progress.add_task(name, total=None)
            return lambda done, of: progress.update(bar, completed=done, total=of)

        yield begin_bar

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
    from fedlesam.federation import Federation
    from fedlesam.probes.surface import Surface

WHAT = "What to measure"
THEORY = "theory"


@click.command(
    "probe",
    cls=GroupedCommand,
    short_help="sharpness, curvature and loss surface of finished runs",
    examples=(
        "fedlesam probe runs/x",
        "fedlesam probe runs/x runs/y --probe sharpness:radius=0.05,steps=20,samples=0 --probe hessian:k=5",
        "fedlesam probe runs/cmp/*-seed0 --probe surface:dims=2,points=25,span=1 --figures figures",
        "fedlesam probe theory",
        "fedlesam probe theory:batch=2,clients=5",
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...|theory")
@click.option(
    "--probe",
    "probes",
    cls=Grouped,
    group=WHAT,
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="sharpness, hessian or surface; may be repeated  [sharpness]",
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
@click.option("--quiet", "-q", cls=Grouped, group=OUTPUT, is_flag=True, help="no progress and no table")
@click.option("--json", "as_json", cls=Grouped, group=OUTPUT, is_flag=True, help="print the numbers, for scripts")
def command(
    runs: tuple[str, ...],
    probes: tuple[str, ...],
    data_dir: str | None,
    device: str | None,
    figures: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure finished runs, all in the same way, and write the numbers into their folders.

    \b
    sharpness  how far the global loss can rise within a radius: first-order and by
               projected gradient ascent, raw and scale-invariant, and each client's own
               [radius=0.1,relative=0.5,steps=10,samples=1000,local=yes,each=no]
    hessian    its k largest eigenvalues and the trace
               [k=3,draws=20,samples=1000]
    surface    the loss along one or two random directions, the same for all runs;
               stopped and repeated, it goes on where it was
               [dims=2,points=25,span=1.0,samples=1000,seed=0]
    theory     no run but a quadratic problem: the bias of FedLESAM's estimate, and the
               bound that Theorem 2 gives for it
               [dimensions=10,clients=10,samples=8,batch=0,starts=20,rounds=5,rho=0.0,seed=0]

    `samples` is about how many training samples are used, as many of each client; 0 takes all. Numbers go to
    RUN/probes.jsonl and RUN/surface-2d.safetensors. Drift and the quality of FedLESAM's estimate need what clients
    remember: they are measured while training, with `fedlesam run --probe drift:every=10`.
    """
    if runs[0].partition(":")[0] == THEORY and not Path(runs[0]).is_dir():
        if len(runs) > 1 or probes:
            raise ValueError("theory looks at no run: call `fedlesam probe theory` alone")
        _show_theory(runs[0], as_json)
        return
    from fedlesam.probes.catalogue import parse_offline

    wanted = [parse_offline(text) for text in probes or ("sharpness",)]
    _measure([Path(run) for run in runs], wanted, data_dir, device, figures, quiet, as_json)


def _measure(
    paths: list[Path],
    wanted: list[Any],
    data_dir: str | None,
    device: str | None,
    figures: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    from fedlesam.build import load_data
    from fedlesam.probes.base import Look, beside, every_or
    from fedlesam.probes.during import take
    from fedlesam.probes.loss import GlobalLoss
    from fedlesam.probes.offline import open_run, read_config
    from fedlesam.probes.surface import Grid, path_of, surface_of
    from fedlesam.runs import RunFolder

    configs = {path: read_config(path, data_dir, device) for path in dict.fromkeys(paths)}
    names = _names({path: config.algorithm for path, config in configs.items()})
    data, loaded = None, None
    surfaces: list[tuple[str, Surface]] = []
    found: list[dict[str, Any]] = []
    shapes: dict[int, str] = {}
    with _progress(quiet or as_json, len(configs) * len(wanted)) as begin:
        for path, config in configs.items():
            if data is None or (config.data, config.data_dir) != loaded:
                data, loaded = load_data(config), (config.data, config.data_dir)
            federation: Federation = open_run(path, config, data)
            for probe in wanted:
                if isinstance(probe, Grid):
                    shapes[federation.state.weights.numel()] = str(path)
                    _same_model(shapes)
                    about = {"algorithm": config.algorithm, "seed": config.seed, "rounds": federation.state.round}
                    loss = GlobalLoss.of(federation, every_or(probe.samples))
                    file, tick = path_of(RunFolder(path), probe.dims), begin(f"{names[path]} surface")
                    with beside(federation):
                        surface = surface_of(loss, federation.state.weights, probe, file, about, tick)
                    surfaces.append((names[path], surface))
                    found.append({"run": str(path), "probe": "surface", "file": str(file)})
                else:
                    probe.check(federation)
                    look = Look(federation, trains_on=False, tick=begin(f"{names[path]} {probe.name}"))
                    reading = take(probe, look, RunFolder(path).probes)
                    found.append({"run": str(path), **dataclasses.asdict(reading)})
    pictures: list[Path] = []
    if surfaces:
        from fedlesam.report.surfaces import draw

        pictures = draw(surfaces, figures or Path(os.path.commonpath([path.resolve() for path in configs])))
    if as_json:
        click.echo(json.dumps({"readings": found, "pictures": [str(picture) for picture in pictures]}))
    elif not quiet:
        _show(found, {str(path): name for path, name in names.items()})
        for picture in pictures:
            click.echo(f"picture: {picture}")


def _same_model(shapes: dict[int, str]) -> None:
    if len(shapes) > 1:
        (one, there), (other, here) = list(shapes.items())[:2]
        raise ValueError(
            f"surface: {there} has {one:,} parameters and {here} has {other:,}: directions can be shared only by runs "
            "of the same model; call it for each model alone"
        )


def _names(methods: dict[Path, str]) -> dict[Path, str]:
    """The method, with the folder's name where a method is there twice."""
    often = list(methods.values())
    return {path: name if often.count(name) == 1 else f"{name} {path.name}" for path, name in methods.items()}


def _show(found: list[dict[str, Any]], names: dict[str, str]) -> None:
    """A table a probe, a column a run."""
    from fedlesam.cli.show import print_table

    for name in dict.fromkeys(line["probe"] for line in found if "values" in line):
        lines = [line for line in found if line["probe"] == name and "values" in line]
        about = {key: value for key, value in lines[0]["about"].items() if not isinstance(value, bool)}
        click.echo(f"{name}, {', '.join(f'{key} {value}' for key, value in about.items())}")
        rows = list(dict.fromkeys(key for line in lines for key in line["values"]))
        cells = [[row, *(_number(line["values"].get(row)) for line in lines)] for row in rows]
        cells.append(["seconds", *(f"{line['seconds']:.1f}" for line in lines)])
        print_table(["", *(names[line["run"]] for line in lines)], cells)
        click.echo("")
    for line in found:
        if "file" in line:
            click.echo(f"surface: {line['file']}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _show_theory(text: str, as_json: bool) -> None:
    import inspect

    from fedlesam.cli.show import print_table
    from fedlesam.probes.catalogue import read_options
    from fedlesam.probes.theory import theorem_2

    takes = inspect.signature(theorem_2).parameters
    kinds = {name: type(p.default) for name, p in takes.items() if name != "steps"}
    settings = {name: p.default for name, p in takes.items() if name != "steps"}
    settings |= read_options(text, text.partition(":")[2], kinds)
    found = theorem_2(**settings)
    if as_json:
        verdicts = [{"holds_as_printed": t.holds_as_printed, "holds_squared": t.holds_squared} for t in found]
        lines = [{**dataclasses.asdict(t), **verdict} for t, verdict in zip(found, verdicts, strict=True)]
        click.echo(json.dumps({"settings": settings, "steps": lines}))
        return
    click.echo("Theorem 2, quadratic losses, one local step, full participation:")
    click.echo(", ".join(f"{name} {value}" for name, value in settings.items()) + "\n")
    columns = ["L lr", "bias, median", "largest", "mean square", "bound", "norm within", "square within", "holds"]
    rows = []
    for t in found:
        holds = "as printed" if t.holds_as_printed else "squared only" if t.holds_squared else "no"
        within = [f"{t.norms_within} of {t.measured}", f"{t.squares_within} of {t.measured}"]
        numbers = [f"{x:.2g}" for x in (t.step, t.bias_median, t.bias_max, t.mean_square, t.bound)]
        rows.append([*numbers, *within, holds])
    print_table(columns, rows)
    click.echo(
        "\nBias: norm(unit(w_before - w_now) - unit(gradient at w_now)). The theorem states its bound for the norm; "
        "its proof\nbounds the mean of the square (docs/errata.md, 12)."
    )


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

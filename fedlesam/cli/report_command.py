"""fedlesam report"""

import json
import math
from pathlib import Path

import click

from fedlesam.cli.options import file, folder, grouped_command, json_option, option, quiet_option


def target(text: str) -> float:
    """`0.8` or `80%` of an accuracy, any number of another metric.

    Args:
        text: As the user typed it.
    """
    try:
        number = float(text.removesuffix("%").strip())
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise click.BadParameter(f"expected an accuracy such as 0.8 or 80%, got {text!r}")
    if number == 0 or (text.endswith("%") and not 0 < number <= 100):
        raise click.BadParameter(f"an accuracy is above 0 and at most 100%, got {text!r}")
    return number / 100 if text.endswith("%") else number


@grouped_command(
    "report",
    "fedlesam report runs/x",
    "fedlesam report runs/fedavg runs/fedlesam --target 80% --target 85% --out report.html",
    "fedlesam report runs/comparison --figures paper/figures --tables paper/tables",
)
@click.argument("folders", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@option(
    "--target",
    "targets",
    group="Tables",
    type=target,
    multiple=True,
    metavar="VALUE",
    help="cost to reach this value of the first metric: 80%; may be repeated  [what FedAvg reaches, and 9/10 of it]",
)
@file("--out", "the page  [report.html]", default=Path("report.html"))
@folder("--figures", "also every chart as PNG and PDF, in paper style")
@folder("--tables", "also every table as CSV, Markdown and LaTeX")
@quiet_option
@json_option
def command(
    folders: tuple[Path, ...],
    targets: tuple[float, ...],
    out: Path,
    figures: Path | None,
    tables: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Make one self-contained page of one run or many: curves, flatness, loss surfaces, costs, how to reproduce.

    RUN is a run folder, or a folder of run folders as `fedlesam compare` and `tune` make. Runs that differ only in
    their seed are drawn as one method with its spread. Runs of different data sets or models are refused together, and
    so are runs evaluated on test data and runs evaluated on held-out samples; other differences are noted on the page.
    """
    from fedlesam.cli.show import Display
    from fedlesam.report.write import write_report
    from fedlesam.runs.read import find_runs

    runs = find_runs(folders)
    with Display(quiet or as_json).open() as display:
        done = display.bar("figures") if figures is not None else lambda done, of: None
        found = write_report(runs, out, figures=figures, tables=tables, targets=sorted(targets), done=done)
    if as_json:
        wrote = {"report": str(out), "figures": figures and str(figures), "tables": tables and str(tables)}
        methods = [{"method": group.label, "seeds": sorted(group.seeds)} for group in found.groups]
        click.echo(json.dumps({**wrote, "methods": methods, "notes": found.notes}))
    elif not quiet:
        for note in found.notes:
            click.echo(f"note: {note}", err=True)
        for name, path in (("figures", figures), ("tables", tables), ("report", out)):
            if path is not None:
                click.echo(f"{name}: {path}")

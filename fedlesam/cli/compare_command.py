"""fedlesam compare"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedlesam.cli.options import TRACKERS, GroupedCommand, Setting, build_config, count, output, settings, trackers
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import evaluated_on

if TYPE_CHECKING:
    from fedlesam.federation import Record
    from fedlesam.runs.trackers import Open


@click.command(
    "compare",
    cls=GroupedCommand,
    short_help="train several methods and rank them",
    examples=(
        "fedlesam compare fedavg fedsam fedlesam",
        "fedlesam compare scaffold fedgamma fedlesam-s --rho 0.05 --seeds 3 --out runs/rho",
        "fedlesam compare fedavg fedlesam --split dirichlet:0.6 --clients 20 --active 5 --rounds 30 --json",
    ),
)
@click.argument("algorithms", nargs=-1, required=True, metavar="METHOD...", type=Setting("algorithm"))
@settings(without=["algorithm"])
@count("--seeds", configs.RUN, "repeat with this many seeds, from --seed on", 1)
@trackers
@output
def command(
    algorithms: tuple[str, ...],
    config_file: Path | None,
    assignments: tuple[str, ...],
    seeds: int,
    out: Path | None,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train several methods on the same clients, batches and first model; rank them and draw their curves.

    Runs that are finished are not repeated, and one that was interrupted is resumed. The folder holds a run folder
    per method and seed, report.html, accuracy.png and split.png. Hyper-parameters go to the methods that take them.
    """
    from fedlesam.runs.trackers import wanted

    openers = wanted(**{name: flags.pop(name) for name in TRACKERS})
    base = build_config(config_file, assignments, flags)
    show_comparison(base, list(algorithms), seeds, out, overwrite, quiet, as_json, openers)


def show_comparison(
    base: RunConfig,
    algorithms: list[str],
    seeds: int,
    out: Path | None,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    openers: "dict[str, Open] | None" = None,
) -> None:
    from fedlesam.cli.show import Display
    from fedlesam.cli.show_ranking import print_gains, print_ranking
    from fedlesam.report import pictures
    from fedlesam.report.ranking import ranking
    from fedlesam.report.write import write_report
    from fedlesam.runs import compare as comparison
    from fedlesam.runs.trackers import watching

    plans, out = comparison.prepare(base, algorithms, seeds, out)
    display = Display(quiet or as_json)
    many, on = seeds > 1, evaluated_on(base)
    try:
        with display.open(), watching(openers or {}) as watchers:

            def watch(plan: RunConfig) -> "Callable[[Record], None]":
                name = f"{plan.algorithm} {plan.seed}" if many else plan.algorithm
                shown = display.watch(name, plan.rounds, on)
                return watchers.watch(plan, comparison.folder_of(out, plan), shown)

            runs = comparison.compare(plans, out, overwrite=overwrite, watch=watch)
    except KeyboardInterrupt:
        display.say(f"interrupted: what was done is in {out}; the same command resumes it")
        raise
    drawn = pictures.comparison(runs, out)
    report = out / "report.html"
    write_report(runs, report)
    rows = ranking(runs)
    if as_json:
        ranked = [dataclasses.asdict(row) for row in rows]
        click.echo(json.dumps({"folder": str(out), "report": str(report), "evaluated_on": on, "ranking": ranked}))
    elif not quiet:
        print_ranking(rows, on)
        print_gains(rows, runs[0].method)
        for picture in drawn:
            click.echo(f"picture: {picture}")
        click.echo(f"runs: {out}")
        click.echo(f"report: {report}")

"""fedlesam compare"""

import dataclasses
import json
from collections.abc import Callable
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from fedlesam.cli.options import Output, Setting, Settings, count, grouped_command, output, settings, trackers
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import evaluated_on

if TYPE_CHECKING:
    from fedlesam.federation import Record
    from fedlesam.runs.read import Run


@grouped_command(
    "compare",
    "fedlesam compare fedavg fedsam fedlesam",
    "fedlesam compare scaffold fedgamma fedlesam-s --rho 0.05 --seeds 3 --out runs/rho",
    "fedlesam compare fedavg fedsam:rho=0.05 fedsam:rho=0.2 fedgmt:strength=0.5",
    "fedlesam compare fedavg fedlesam --split dirichlet:0.6 --clients 20 --active 5 --rounds 30 --json",
)
@click.argument("algorithms", nargs=-1, required=True, metavar="METHOD...", type=Setting("algorithm"))
@settings(without=["algorithm"])
@count("--seeds", configs.RUN, "repeat with this many seeds, from --seed on", 1)
@trackers
@output
def command(
    algorithms: tuple[str, ...], settings: Settings, seeds: int, trackers: dict[str, Any], output: Output
) -> None:
    """Train several methods on the same clients, batches and first model; rank them and draw their curves.

    Runs that are finished are not repeated, and one that was interrupted is resumed. The folder holds a run folder
    per method and seed, report.html, accuracy.png and split.png. Hyper-parameters go to the methods that take them.
    METHOD:KEY=VALUE,... gives one method its own, and so compares a method with itself.
    """
    show_comparison(settings, list(algorithms), seeds, trackers, output)


def show_comparison(
    settings: Settings,
    algorithms: list[str],
    seeds: int,
    trackers: dict[str, Any],
    output: Output,
    story: "Callable[[list[Run]], list[str]] | None" = None,
) -> None:
    """Train every method with every seed, and print their ranking.

    Args:
        settings: Of the runs, from the flags.
        algorithms: The methods' names; differences are over the first.
        seeds: Runs of each method.
        trackers: Flags of the trackers, by name.
        output: Where results go and how much is printed.
        story: Sentences for the end, from the runs; None for none.
    """
    from fedlesam.cli.show import WIDTH_IN_A_PIPE, Display
    from fedlesam.cli.show_ranking import print_gains, print_ranking
    from fedlesam.report import pictures
    from fedlesam.report.ranking import ranking
    from fedlesam.report.write import write_report
    from fedlesam.runs import compare as comparison
    from fedlesam.runs.trackers import wanted, watching

    openers, base = wanted(**trackers), settings()
    plans, out = comparison.prepare(base, algorithms, seeds, output.out)
    display, on = Display(output.quiet or output.as_json), evaluated_on(base)
    with display.open(out, anew=output.overwrite), watching(openers) as watchers:

        def watch(name: str, plan: RunConfig) -> "Callable[[Record], None]":
            method, _, seed = name.rpartition("-seed")
            shown = display.watch(f"{method} {seed}" if seeds > 1 else method, plan.rounds, on)
            return watchers.watch(plan, out / name, shown)

        runs = comparison.compare(plans, out, overwrite=output.overwrite, watch=watch)
    drawn = pictures.comparison(runs, out)
    report = out / "report.html"
    found = write_report(runs, report)
    rows = ranking(runs)
    if output.as_json:
        ranked = [dataclasses.asdict(row) for row in rows]
        click.echo(json.dumps({"folder": str(out), "report": str(report), "evaluated_on": on, "ranking": ranked}))
    elif not output.quiet:
        print_ranking(rows, on)
        print_gains(rows, found.groups[0].label)
        for sentence in story(runs) if story is not None else ():
            click.echo(f"\n{fill(sentence, WIDTH_IN_A_PIPE)}")
        click.echo()
        for picture in drawn:
            click.echo(f"picture: {picture}")
        click.echo(f"runs: {out}")
        click.echo(f"report: {report}")

"""fedlesam reproduce"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedlesam.cli import FAILED
from fedlesam.cli.options import OUTPUT, Grouped, GroupedCommand

if TYPE_CHECKING:
    from fedlesam.experiments.reproduce import Wish

WHICH, HOW = "What", "How"


def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from fedlesam.experiments.items import ITEMS

    return [name for name in (*ITEMS, "all", *_claims()) if name.startswith(incomplete)]


def _claims() -> tuple[str, ...]:
    from fedlesam.experiments.studies import NAMES

    return NAMES


@click.command(
    "reproduce",
    cls=GroupedCommand,
    short_help="tables and figures of the paper beside ours",
    examples=(
        "fedlesam reproduce --list",
        "fedlesam reproduce all --scale smoke",
        "fedlesam reproduce table2 --scale cpu --only splits=dirichlet-0.1,clients=100 --data-dir data --jobs 2",
        "fedlesam reproduce table3 --scale cpu --only data=pacs,clients=1 --data-dir data --jobs 2",
        "fedlesam reproduce table2 table5 table8 --scale full --seeds 3 --data-dir data",
        "fedlesam reproduce claim --scale cpu --jobs 2",
    ),
)
@click.argument(
    "items", nargs=-1, metavar="[table1...table9|fig1...fig6|theory|all|claim...]...", shell_complete=complete
)
@click.option("--list", "listing", cls=Grouped, group=WHICH, is_flag=True, help="what there is, runs and cost")
@click.option(
    "--scale",
    cls=Grouped,
    group=WHICH,
    default="smoke",
    metavar="NAME",
    help="smoke (seconds, embedded data), cpu (a reduction for two cores) or full (the paper's protocol)  [smoke]",
)
@click.option(
    "--only",
    cls=Grouped,
    group=WHICH,
    default="",
    metavar="KEY=VALUE,...",
    help="leave out all else: methods=fedavg,fedlesam,splits=dirichlet-0.1,data=cifar10,clients=100",
)
@click.option(
    "--seeds", cls=Grouped, group=WHICH, type=click.IntRange(1), metavar="N", help="runs per cell  [1; full: 3]"
)
@click.option("--data-dir", cls=Grouped, group=WHICH, metavar="DIR", help="where the data sets are")
@click.option("--jobs", cls=Grouped, group=HOW, type=click.IntRange(1), default=1, metavar="N", help="runs at once [1]")
@click.option(
    "--workers", cls=Grouped, group=HOW, type=click.IntRange(1), default=1, metavar="N", help="processes per run  [1]"
)
@click.option("--dry-run", cls=Grouped, group=HOW, is_flag=True, help="say what would be run and what it costs")
@click.option(
    "--out",
    cls=Grouped,
    group=OUTPUT,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="the sweep's folder  [runs/reproduce-SCALE]",
)
@click.option("--quiet", "-q", cls=Grouped, group=OUTPUT, is_flag=True, help="no progress and no tables")
def command(
    items: tuple[str, ...],
    listing: bool,
    scale: str,
    only: str,
    seeds: int | None,
    data_dir: str | None,
    jobs: int,
    workers: int,
    dry_run: bool,
    out: Path | None,
    quiet: bool,
) -> int:
    """Run what a table or figure of the paper shows, and put ours beside it.

    Repeat the command to go on: finished runs are kept, interrupted ones go on at their checkpoint, failed ones are
    tried again. Runs that several tables need are run once. Results go to DIR/results: Markdown, LaTeX, CSV, pictures
    and a page, index.html. A data set that is not there leaves holes, which are marked.

    claim, claim-regimes and claim-cifar10 ask whether the paper's claims hold: every method's rho is chosen on held-out
    training data, then all are compared on the same seeds.
    """
    from fedlesam.experiments.plan import find_items, parse_only
    from fedlesam.experiments.scales import SCALES
    from fedlesam.names import unknown

    if listing:
        _list()
        return 0
    if not items:
        raise click.UsageError("name a table or figure, or `all`; `fedlesam reproduce --list` shows them")
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)

    if set(items) & set(_claims()):
        if len(items) > 1 or only:
            raise click.UsageError(f"{items[0]}: a question about the claim stands alone and takes no --only")
        return _answer(items[0], scale, seeds, data_dir, workers, jobs, dry_run, out, quiet)

    from fedlesam.experiments.reproduce import Wish

    wish = Wish(find_items(items), SCALES[scale], parse_only(only), seeds, data_dir, workers, jobs)
    if dry_run:
        _say_plan(wish)
        return 0
    return _reproduce(wish, out or Path("runs") / f"reproduce-{scale}", quiet)


def _list() -> None:
    from fedlesam.cli.show import print_table
    from fedlesam.experiments.claim import price as price_of
    from fedlesam.experiments.estimate import spoken
    from fedlesam.experiments.items import ITEMS
    from fedlesam.experiments.plan import price
    from fedlesam.experiments.scales import SCALES
    from fedlesam.experiments.studies import Where, studies

    rows = [
        [item.name, item.shows, str(len(item.trained)), *(price(item, scale) for scale in SCALES.values())]
        for item in ITEMS.values()
    ]
    for name in _claims():
        asked = {scale.name: (studies(scale)[name], Where(scale)) for scale in SCALES.values()}
        shows, priced = asked["cpu"][0].shows, {scale: price_of(*both) for scale, both in asked.items()}
        costs = [f"{spoken(priced[scale][1])} core" for scale in ("smoke", "cpu")]
        rows.append([name, shows, str(priced["cpu"][0]), *costs, "not known" if "cifar" in name else "as cpu"])
    print_table(["", "shows", "runs", *SCALES], rows)
    seeds = ", ".join(f"{scale.name} {scale.seeds}" for scale in SCALES.values())
    click.echo(
        f"\nruns: the paper's, per seed (seeds: {seeds}); those that several tables need are run once. OfficeHome and"
        "\nDomainNet are left out of smoke; PACS stands in for them at cpu. Time: of one core (smoke, cpu), or of one"
        "\nRTX 3090 by the paper's table 8 (full; ViT-B/32 is not in it: as ResNet-18, by samples and multiplications)."
        "\nclaim...: all runs at the cpu scale, all seeds, those that choose rho included."
    )


def _say_plan(wish: "Wish") -> None:
    from fedlesam.experiments import estimate
    from fedlesam.experiments.reproduce import possible

    planned = possible(wish, decode=False)
    different = {str(config): config for configs in planned.runs.values() for config in configs}
    rounds = sum(config.rounds for config in different.values())
    cost = sum(map(estimate.seconds, different.values()))
    click.echo(f"{len(different)} runs, {rounds:,} rounds, about {estimate.spoken(cost)} of one core")
    for why in dict.fromkeys(planned.holes.values()):
        click.echo(f"hole: {why}")
    for text in wish.terms():
        click.echo(text)


def _reproduce(wish: "Wish", out: Path, quiet: bool) -> int:
    from fedlesam.cli.show import Display
    from fedlesam.cli.sweep_display import SweepDisplay
    from fedlesam.experiments.reproduce import reproduce
    from fedlesam.experiments.writing import markdown

    display = Display(quiet)
    for text in wish.terms():
        display.say(text)
    try:
        with display.open(), SweepDisplay(display).open() as shown:
            outcome = reproduce(wish, out, shown.begin, display.say)
    except KeyboardInterrupt:
        display.say(f"interrupted: what was done is in {out}; the same command goes on with it")
        raise
    if not quiet:
        for sheet in outcome.sheets:
            click.echo(markdown(sheet))
        click.echo(f"results: {out / 'results'}")
    return say_failed(outcome.failed)


def _answer(
    name: str,
    scale: str,
    seeds: int | None,
    data_dir: str | None,
    workers: int,
    jobs: int,
    dry_run: bool,
    out: Path | None,
    quiet: bool,
) -> int:
    from fedlesam.cli.show import Display
    from fedlesam.cli.sweep_display import SweepDisplay
    from fedlesam.experiments import claim
    from fedlesam.experiments.estimate import spoken
    from fedlesam.experiments.scales import SCALES
    from fedlesam.experiments.studies import Where, studies
    from fedlesam.experiments.writing import markdown

    where = Where(SCALES[scale], data_dir, workers)
    study, folder = studies(where.scale, seeds)[name], out or Path("runs") / f"{name}-{scale}"
    display = Display(quiet)
    runs, cost = claim.price(study, where)
    display.say(f"{runs} runs, about {spoken(cost)} of one core")
    for text in claim.terms(study, where):
        display.say(text)
    if dry_run:
        return 0
    try:
        with display.open(), SweepDisplay(display).open() as shown:
            outcome = claim.answer(study, where, folder, jobs, shown.begin, display.say)
    except KeyboardInterrupt:
        display.say(f"interrupted: what was done is in {folder}; the same command goes on with it")
        raise
    if not quiet:
        click.echo(markdown(outcome.sheet))
        click.echo(f"results: {folder / 'results'}")
    return say_failed(outcome.failed)


def say_failed(failed: dict[str, str]) -> int:
    """The exit code."""
    for label, why in failed.items():
        click.echo(f"failed: {label}: {why}", err=True)
    if failed:
        click.echo(f"{len(failed)} runs failed; the same command tries them again", err=True)
    return FAILED if failed else 0

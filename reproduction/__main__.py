"""The command `python -m reproduction`."""

from functools import partial
from pathlib import Path

import click

from fedlesam.cli import main
from fedlesam.cli.options import OUTPUT, Grouped, GroupedCommand
from fedlesam.cli.show import Display, print_table
from fedlesam.cli.sweep_display import print_failed, watch_sweep
from fedlesam.core.names import unknown
from reproduction import claim, lines_studies, plan, why
from reproduction.items import ITEMS
from reproduction.plan import find_items, parse_only
from reproduction.reproduce import Request, available, reproduce
from reproduction.scales import SCALES
from reproduction.studies import NAMES, Where, studies
from reproduction.writing import markdown

WHICH, HOW = "What", "How"


@click.command(
    "reproduction",
    cls=GroupedCommand,
    examples=(
        "python -m reproduction --list",
        "python -m reproduction all --scale smoke",
        "python -m reproduction table2 --scale cpu --only splits=dirichlet-0.1,clients=100 --data-dir data --jobs 2",
        "python -m reproduction table3 --scale cpu --only data=pacs,clients=1 --data-dir data --jobs 2",
        "python -m reproduction table2 table5 table8 --scale full --seeds 3 --data-dir data",
        "python -m reproduction claim --scale cpu --jobs 2",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.argument("items", nargs=-1, metavar="[table1...table9|fig1...fig6|theory|all|claim...]...")
@click.option("--list", "listing", cls=Grouped, group=WHICH, is_flag=True, help="what there is, runs and rounds")
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
    help="leave out all else: methods=fedavg,fedlesam,splits=dirichlet-0.1,data=cifar10,clients=100; images=15",
)
@click.option(
    "--seeds", cls=Grouped, group=WHICH, type=click.IntRange(1), metavar="N", help="runs per cell  [1; full: 3]"
)
@click.option(
    "--lines",
    cls=Grouped,
    group=WHICH,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="of a study: make its tables from the lines of finished runs, e.g. docs/results/claim/claim-runs.csv",
)
@click.option("--data-dir", cls=Grouped, group=WHICH, metavar="DIR", help="where the data sets are")
@click.option("--jobs", cls=Grouped, group=HOW, type=click.IntRange(1), default=1, metavar="N", help="runs at once [1]")
@click.option(
    "--workers", cls=Grouped, group=HOW, type=click.IntRange(1), default=1, metavar="N", help="processes per run  [1]"
)
@click.option(
    "--stack-runs",
    cls=Grouped,
    group=HOW,
    type=click.IntRange(8),
    metavar="ROWS",
    help="runs that differ in seed or numbers as one computation, of so many clients at once (small models)",
)
@click.option("--dry-run", cls=Grouped, group=HOW, is_flag=True, help="print what would be run; train nothing")
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
    lines: Path | None,
    data_dir: str | None,
    jobs: int,
    workers: int,
    stack_runs: int | None,
    dry_run: bool,
    out: Path | None,
    quiet: bool,
) -> int:
    """Run what a table or figure of the paper shows, and compare our results with the printed ones.

    Repeat the command to resume: finished runs are kept, interrupted ones continue at their checkpoint, failed ones are
    tried again. Runs that several tables need are run once. Results go to DIR/results: Markdown, LaTeX, CSV, pictures
    and a page, index.html. Cells of a data set that is missing are empty and give the reason.

    claim, claim-regimes and claim-cifar10 test whether the paper's claims hold: every method's rho is chosen on
    validation images split from the training data, then all methods are compared on the same seeds. claim-features does
    so on frozen features, which `fedlesam data features cifar10 --mirror --pca 256` puts into the data folder, and
    claim-domains with a domain of PACS left out; several processes can work on one DIR.
    """
    if listing:
        _list()
        return 0
    if not items:
        raise click.UsageError("name a table or figure, or `all`; `python -m reproduction --list` shows them")
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if named := set(items) & set(lines_studies.STUDIES):
        study = lines_studies.STUDIES[named.pop()]
        if len(items) > 1 or (only and not study.only):
            raise click.UsageError(f"{study.name} stands alone" + ("" if study.only else " and takes no --only"))
        asked = lines_studies.Asked(scale, only, seeds, Path(data_dir) if data_dir else None, lines)
        study.run(asked, out or Path("runs") / f"{study.name}-{scale}", dry_run, Display(quiet))
        return 0
    if why.NAME in items:
        if len(items) > 1 or only:
            raise click.UsageError(f"{why.NAME} stands alone and takes no --only")
        table = why.run(Where(SCALES[scale]), out or Path("runs") / why.NAME, Display(quiet).print)
        click.echo(markdown(table) if not quiet else "", nl=False)
        return 0
    if set(items) & set(NAMES):
        if len(items) > 1 or only:
            raise click.UsageError(f"{items[0]}: a study of the claim stands alone and takes no --only")
        folder = out or Path("runs") / f"{items[0]}-{scale}"
        if lines is not None:
            table = claim.rebuild(studies(SCALES[scale], seeds)[items[0]], Where(SCALES[scale]), lines, folder)
            click.echo(markdown(table) if not quiet else "", nl=False)
            return 0
        here = Where(SCALES[scale], data_dir, workers, stack_runs)
        return _study(items[0], here, seeds, jobs, dry_run, folder, Display(quiet))
    request = Request(find_items(items), SCALES[scale], parse_only(only), seeds, data_dir, workers, jobs, stack_runs)
    if dry_run:
        _print_plan(request)
        return 0
    return _reproduce(request, out or Path("runs") / f"reproduce-{scale}", Display(quiet))


def _list() -> None:
    rows = []
    for item in ITEMS.values():
        plans = [plan.make([item], plan.Only(), scale, scale.seeds) for scale in SCALES.values()]
        rows.append([item.name, item.shows, *(_size(*plan.count(one)) for one in plans)])
    for name in NAMES:
        asked = [(studies(scale)[name], Where(scale)) for scale in SCALES.values()]
        rows.append([name, asked[0][0].shows, *(_size(*claim.count(*one)) for one in asked)])
    for study in lines_studies.STUDIES.values():
        rows.append([study.name, study.shows, *(_size(*study.count(scale)) for scale in SCALES)])
    rows.append([why.NAME, why.SHOWS, "11 / 33", "33 / 4,950", "33 / 4,950"])
    print_table(["", "shows", *SCALES], rows)
    seeds = ", ".join(f"{scale.name} {scale.seeds}" for scale in SCALES.values())
    click.echo(
        f"\nDifferent runs / rounds with each scale's number of seeds ({seeds}); runs that several tables need are run "
        "once.\nOfficeHome and DomainNet are left out of smoke; PACS replaces them at cpu."
    )


def _size(runs: int, rounds: int) -> str:
    return f"{runs:,} / {rounds:,}" if runs else "-"


def _print_plan(request: Request) -> None:
    planned = available(request, decode=False)
    runs, rounds = plan.count(planned)
    click.echo(f"{runs} runs, {rounds:,} rounds")
    for reason in dict.fromkeys(planned.missing.values()):
        click.echo(f"missing: {reason}")
    for text in request.terms():
        click.echo(text)


def _reproduce(request: Request, out: Path, display: Display) -> int:
    for text in request.terms():
        display.print(text)
    with display.open(out):
        outcome = reproduce(request, out, partial(watch_sweep, display), display.print)
    if not display.quiet:
        for table in outcome.tables:
            click.echo(markdown(table))
        click.echo(f"results: {out / 'results'}")
    return print_failed(outcome.failed)


def _study(name: str, where: Where, seeds: int | None, jobs: int, dry_run: bool, out: Path, display: Display) -> int:
    study = studies(where.scale, seeds)[name]
    runs, rounds = claim.count(study, where)
    display.print(f"{runs} runs, {rounds:,} rounds")
    for text in claim.terms(study, where):
        display.print(text)
    if dry_run:
        return 0
    with display.open(out):
        outcome = claim.run(study, where, out, jobs, partial(watch_sweep, display), display.print)
    if not display.quiet:
        click.echo(markdown(outcome.table))
        click.echo(f"results: {out / 'results'}")
    return print_failed(outcome.failed)


if __name__ == "__main__":
    main(command)

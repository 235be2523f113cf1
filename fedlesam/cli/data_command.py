"""fedlesam data"""

from pathlib import Path

import click

from fedlesam.cli.options import GroupedCommand

WHERE = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="the folder of the files  [./data]",
)


@click.group("data", short_help="fetch and check data sets")
def command() -> None:
    """Fetch data sets, and check those you have. `fedlesam list data` names them."""


@command.command(
    "fetch",
    cls=GroupedCommand,
    short_help="download a data set",
    examples=("fedlesam data fetch cifar10 --data-dir data",),
)
@click.argument("name")
@WHERE
@click.option("--quiet", "-q", is_flag=True, help="no progress")
def fetch_command(name: str, data_dir: Path | None, quiet: bool) -> None:
    """Download a data set from its publishers and check its checksum; broken transfers are tried again."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from fedlesam.data import fetch

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=quiet or not console.is_terminal) as bars:
        known: dict[str, object] = {}

        def see(file: str, done: int, total: int | None) -> None:
            task = known.setdefault(file, None)
            if task is None:
                known[file] = task = bars.add_task(file, total=total)
            bars.update(task, completed=done, total=total)  # type: ignore[arg-type]

        for path in fetch(name, data_dir, see):
            if not quiet:
                click.echo(f"there: {path}")


@command.command(
    "check",
    cls=GroupedCommand,
    short_help="print what was found",
    examples=(
        "fedlesam data check cifar10 --data-dir data",
        "fedlesam data check folder:my-pictures",
        "fedlesam data check pacs:size=96 --data-dir data",
    ),
)
@click.argument("name")
@WHERE
def check_command(name: str, data_dir: Path | None) -> None:
    """Load a data set and print what was found: its form, files, counts per class and fingerprint."""
    from fedlesam.cli.show import Display
    from fedlesam.data import check

    with Display(quiet=False).open():
        found = check(name, data_dir)
    click.echo("\n".join(found.lines()))

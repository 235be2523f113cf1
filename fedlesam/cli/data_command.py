"""fedlesam data"""

import functools
from pathlib import Path

import click

from fedlesam.cli.options import GroupedCommand, option

WHERE = option("--data-dir", group="Files", type=Path, metavar="DIR", help="the folder of the files  [./data]")


@click.group("data")
def command() -> None:
    """Fetch data sets, and check those you have. `fedlesam list data` names them."""


@command.command(
    "fetch",
    cls=GroupedCommand,
    examples=("fedlesam data fetch cifar10 --data-dir data",),
)
@click.argument("name")
@WHERE
@click.option("--quiet", "-q", is_flag=True, help="no progress")
def fetch_command(name: str, data_dir: Path | None, quiet: bool) -> None:
    """Download a data set from its publishers and check its checksum; broken transfers are tried again."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    from fedlesam.cli.show import Display
    from fedlesam.data import fetch

    with Display(quiet, DownloadColumn(), TransferSpeedColumn()).open() as display:
        tick = functools.cache(display.bar)
        for path in fetch(name, data_dir, lambda file, done, total: tick(file)(done, total)):
            if not quiet:
                click.echo(f"there: {path}")


@command.command(
    "check",
    cls=GroupedCommand,
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

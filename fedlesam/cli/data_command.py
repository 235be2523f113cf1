"""fedlesam data"""

import functools
from pathlib import Path

import click

from fedlesam.cli.options import GroupedCommand, option

WHERE = option("--data-dir", group="Files", type=Path, metavar="DIR", help="the folder with the files  [./data]")


@click.group("data")
def command() -> None:
    """Fetch data sets, and check those you have. `fedlesam list data` names them."""


@command.command(
    "fetch",
    cls=GroupedCommand,
    short_help="download a data set from its publishers and check it",
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
                click.echo(f"file: {path}")


@command.command(
    "check",
    cls=GroupedCommand,
    short_help="load a data set and print what was found",
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


@command.command(
    "features",
    cls=GroupedCommand,
    short_help="compute frozen features of a data set, which are then data themselves",
    examples=(
        "fedlesam data features cifar10 --trunk efficientnet-lite0 --size 96 --mirror --pca 256 --data-dir data",
        "fedlesam run --data features:data/cifar10-efficientnet-lite0-96-mirror-pca256.safetensors --model head",
    ),
)
@click.argument("name")
@WHERE
@click.option(
    "--trunk", default="efficientnet-lite0", metavar="NAME", help="a pretrained network  [efficientnet-lite0]"
)
@click.option(
    "--size", type=int, default=96, metavar="N", help="resize images to this height and width in pixels  [96]"
)
@click.option(
    "--mirror", is_flag=True, help="also compute features of the mirror images; training then uses either at random"
)
@click.option("--pca", type=int, metavar="N", help="keep this number of principal components  [all features]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="the file  [in DIR, named after the other options]",
)
@click.option("--quiet", "-q", is_flag=True, help="no progress")
def features_command(
    name: str,
    data_dir: Path | None,
    trunk: str,
    size: int,
    mirror: bool,
    pca: int | None,
    out: Path | None,
    quiet: bool,
) -> None:
    """Compute the outputs of a pretrained network without its head; `--data features:FILE` then trains heads on them.

    Results are kept in the cache: repeat the command to resume it, or to keep another number of components.
    """
    from fedlesam.cli.show import Display
    from fedlesam.data.features import Request, compute

    with Display(quiet).open():
        path = compute(Request(name, trunk, size, mirror, pca), out, data_dir)
    click.echo(f"--data features:{path}")

"""fedlesam demo"""

from pathlib import Path

import click

from fedlesam.cli.options import Output
from fedlesam.runs.config import RunConfig

METHODS = ["fedavg", "fedsam", "scaffold", "fedlesam", "fedlesam-s"]


@click.command("demo")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True, metavar="DIR")
@click.option("--rounds", type=click.IntRange(1), default=100, show_default=True, metavar="T")
@click.option("--overwrite", is_flag=True, help="start again where the folder holds an unfinished or another demo")
def command(out: Path, rounds: int, overwrite: bool) -> None:
    """Compare FedAvg, FedSAM, SCAFFOLD, FedLESAM and FedLESAM-S on handwritten digits.

    40 clients, each with few of the ten classes (Dirichlet 0.1), 4 of them active a round. Prints a ranking and
    writes the accuracy curves and the split as pictures, and a page to explore them.
    """
    from fedlesam.cli.compare_command import show_comparison

    config = RunConfig(data="digits", model="mlp", split="dirichlet:0.1", clients=40, rounds=rounds, threads=1)
    show_comparison(lambda: config, METHODS, 1, {}, Output(out, overwrite))

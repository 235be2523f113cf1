"""fedlesam demo"""

from pathlib import Path

import click

from fedlesam.cli.options import Output
from fedlesam.runs.config import RunConfig

METHODS = ["fedavg", "fedsam", "scaffold", "fedlesam", "fedlesam-s"]
SEEDS = 3


@click.command("demo")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True, metavar="DIR")
@click.option("--rounds", type=click.IntRange(1), default=60, show_default=True, metavar="T")
@click.option(
    "--rho",
    type=click.FloatRange(0, min_open=True),
    default=0.1,
    show_default=True,
    metavar="RHO",
    help="the norm of the perturbations; at 0.3 FedLESAM loses accuracy, at 0.01 hardly anything differs",
)
@click.option("--overwrite", is_flag=True, help="start again if the folder holds another demo or an unfinished one")
def command(out: Path, rounds: int, rho: float, overwrite: bool) -> None:
    """Compare FedAvg, FedSAM, SCAFFOLD, FedLESAM and FedLESAM-S on handwritten digits, three seeds each.

    40 clients, each with few of the ten classes (Dirichlet 0.1), 4 of them active a round. Prints accuracy, sharpness
    and costs, and describes the result in two sentences. Writes pictures of the curves and of the split, and a page to
    explore them.
    """
    from fedlesam.cli.compare_command import show_comparison
    from fedlesam.report.story import story

    config = RunConfig(
        data="digits",
        model="mlp",
        split="dirichlet:0.1",
        clients=40,
        rounds=rounds,
        threads=1,
        hyper={"rho": rho},
        probe=f"sharpness:every={rounds},local=no,trained=no",
        stack_runs=12,
    )
    show_comparison(lambda: config, METHODS, SEEDS, {}, Output(out, overwrite), story)

"""An outside anchor: FedAvg as Flower's baseline niid_bench runs it, ours beside its published figures.

LeNet-5 (6, 16, 120, 84), 10 clients, all active, 10 local epochs, 50 rounds, batches of 64, learning rate .01,
momentum .9, weight decay 1e-5, weighted by examples, the best round.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from fedlesam.core import disk
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.kinds import Value
from fedlesam.runs.read import read_run
from fedlesam.runs.stats import seed_mean
from fedlesam.runs.sweep import Sweep, Task, Watch
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.scales import Scale
from reproduction.writing import markdown

NAME = "anchor-niid"
SHOWS = "FedAvg beside the published figures of Flower's niid_bench"

SPLITS = {"iid": "iid", "Dirichlet .5": "dirichlet-by-class:0.5"}
PUBLISHED = {
    ("cifar10", "iid"): (71.32, 0.33),
    ("cifar10", "Dirichlet .5"): (62.47, 0.43),
    ("fashion-mnist", "iid"): (89.23, 0.45),
    ("fashion-mnist", "Dirichlet .5"): (88.09, 0.29),
}
"""Accuracy of the best round in percent and its spread, from the baseline's README."""
SETTINGS: dict[str, Value] = {
    "algorithm": "fedavg",
    "model": "reproduction.anchor:lenet5",
    "clients": 10,
    "active": 10,
    "epochs": 10,
    "rounds": 50,
    "batch_size": 64,
    "lr": 0.01,
    "lr_decay": 1.0,
    "momentum": 0.9,
    "weight_decay": 1e-5,
    "clip": 0.0,
    "weighting": "examples",
    "augment": False,
    "threads": 1,
}
NOTES = (
    "difference: pixels are normalised by each data set's own mean and deviation",
    "difference: a class is divided over the clients by Dirichlet(.5) without their least number of samples per client",
    "difference: where CIFAR-10 is read from JPEGs, it is not the lossless original",
    "rule: accuracy is that of the best round, on the test images, as theirs",
)
Begin = Callable[[Sequence[Task]], Watch]


def lenet5(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """LeNet-5 as the baseline has it.

    Args:
        shape: (channels, height, width) of an input.
        classes: The number of classes.
    """
    channels, height, width = shape

    def after(pixels: int) -> int:
        return ((pixels - 4) // 2 - 4) // 2

    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * after(height) * after(width), 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def config(scale: Scale, data: str, split: str, seed: int, data_dir: str | None) -> RunConfig:
    """One run; at smoke scale digits, a small network and two rounds."""
    values = {**SETTINGS, "keep_last": False, "data": data, "split": SPLITS[split], "seed": seed, "data_dir": data_dir}
    if scale.name == "smoke":
        values |= {"data": "digits", "model": "mlp:hidden=8", "rounds": 2, "epochs": 1, "data_dir": None}
    return configs.resolve(configs.update(RunConfig(), values))


def run(
    scale: Scale, seeds: int, data_dir: str | None, out: Path, jobs: int, begin: Begin
) -> tuple[ResultTable, dict[str, str]]:
    """Train what is not finished in the folder, and write the table; a cell waits for all its seeds.

    Returns:
        The table, and why runs failed.
    """
    with Sweep(out).open() as sweep:
        tasks = {
            (cell, seed): sweep.task(config(scale, *cell, seed, data_dir), f"{', '.join(cell)}, seed {seed}")
            for cell in PUBLISHED
            for seed in range(seeds)
        }
        left = list({task.folder: task for task in tasks.values() if not sweep.is_done(task)}.values())
        if left:
            sweep.run(left, jobs, begin(left))
        wrong = sweep.failed
        failed = {task.label: wrong[task.folder.name]["why"] for task in left if task.folder.name in wrong}
        rows = {}
        for cell, theirs in PUBLISHED.items():
            done = [task for (of, _), task in tasks.items() if of == cell and sweep.is_done(task)]
            rows[", ".join(cell)] = (_cell([best(task.folder) for task in done], theirs, len(done) == seeds),)
    table = ResultTable(NAME, SHOWS, (Block("", ("best round, %",), rows),), NOTES)
    disk.write_text(out / "results" / f"{NAME}.md", markdown(table))
    return table, failed


def best(folder: Path) -> float:
    """The accuracy of the best round in percent."""
    return 100 * max(float(record["test_accuracy"]) for record in read_run(folder).records if "test_accuracy" in record)


def _cell(ours: list[float], theirs: tuple[float, float], whole: bool) -> Cell:
    mean = seed_mean(ours) if whole else None
    if mean is None:
        return Cell(None, None, *theirs, missing="not all runs are finished")
    return Cell(mean.mean, mean.spread, *theirs)

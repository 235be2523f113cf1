"""An outside anchor: FedAvg as Flower's baseline niid_bench runs it, ours beside its published figures.

LeNet-5 (6, 16, 120, 84), 10 clients, all active, 10 local epochs, 50 rounds, batches of 64, learning rate .01,
momentum .9, weight decay 1e-5, weighted by examples, the best round. As in the baseline's code, a tenth of every
client's images is set aside and not used, pixels are between 0 and 1, and images of CIFAR-10 are mirrored and cut at
random out of themselves with a reflected border.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlesam import data
from fedlesam.core.local import LocalTraining
from fedlesam.data.dataset import DataSet
from fedlesam.engines.settings import Execution
from fedlesam.federation import Federation
from fedlesam.models.catalogue import make_model
from fedlesam.runs.stats import seed_mean
from fedlesam.runs.versions import versions
from reproduction.result_table import Block, Cell, ResultTable

NAME = "anchor-niid"
SHOWS = "FedAvg beside the published figures of Flower's niid_bench"

PUBLISHED = {
    ("cifar10", "iid"): (71.32, 0.33),
    ("fashion-mnist", "iid"): (89.23, 0.45),
    ("cifar10", "Dirichlet .5"): (62.47, 0.43),
    ("fashion-mnist", "Dirichlet .5"): (88.09, 0.29),
}
"""Accuracy of the best round in percent and its spread, from the baseline's README; in the order of work."""
CLIENTS, EPOCHS, ROUNDS, BATCH, SEEDS = 10, 10, 50, 64, 3
UNUSED = 0.1
"""Of every client's images."""
LEAST = 10
"""Images of a client; a division by Dirichlet that gives one fewer is drawn again."""
NOTES = (
    "rule: the paper's figures are here those of the baseline's README",
    "rule: accuracy is that of the best round, on the test images, as theirs",
    "difference: seeds of the division, of the first model and of the batches are ours; ± is over three of them",
    "difference: where CIFAR-10 is read from JPEGs, it is not the lossless original",
)

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trial:
    """A run."""

    data: str
    split: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.data}-{self.split.replace(' ', '-')}-seed{self.seed}"


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


def flip_and_cut(x: Tensor, rng: torch.Generator, pad: int = 4) -> Tensor:
    """Mirror each image with p .5, and cut it at a random place out of itself with a reflected border.

    Args:
        x: A batch of images.
        rng: The only source of randomness.
        pad: The width of the border in pixels.
    """
    count, channels, height, width = x.shape
    mirrored = torch.rand(count, generator=rng) < 0.5
    corner = torch.randint(0, 2 * pad + 1, (2, count), generator=rng)
    rows = corner[0, :, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, -1)
    columns = corner[1, :, None] + torch.where(mirrored[:, None], width - 1 - columns, columns)
    places = (rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]).flatten(1)
    bordered = functional.pad(x, (pad, pad, pad, pad), mode="reflect").flatten(2)
    return bordered.gather(2, places[:, None].expand(-1, channels, -1)).view_as(x)


def divide(labels: Places, split: str, clients: int, rng: np.random.Generator) -> list[Places]:
    """The numbers of the images of every client.

    Under Dirichlet(.5) every class is divided in random proportions over those clients that do not yet have their
    share of all images.

    Args:
        labels: The class of every image.
        split: iid, or Dirichlet .5.
        clients: How many.
        rng: The only source of randomness.
    """
    if split == "iid":
        return np.array_split(rng.permutation(len(labels)), clients)
    while True:
        parts: list[Places] = [np.empty(0, np.int64)] * clients
        for label in np.unique(labels):
            of_class = rng.permutation(np.flatnonzero(labels == label))
            open_to = np.array([len(part) < len(labels) / clients for part in parts])
            shares = rng.dirichlet(np.full(clients, 0.5)) * open_to
            cuts = (np.cumsum(shares / shares.sum()) * len(of_class)).astype(int)[:-1]
            parts = [np.concatenate(pair) for pair in zip(parts, np.split(of_class, cuts), strict=True)]
        if min(map(len, parts)) >= LEAST:
            return parts


def load(name: str, data_dir: Path | None, smoke: bool) -> DataSet:
    """A data set with pixels between 0 and 1, and the baseline's augmentation; at smoke scale digits."""
    found = data.load("digits" if smoke else name, data_dir)
    channels = found.shape[0]
    augment = flip_and_cut if name == "cifar10" else None
    return dataclasses.replace(found, mean=(0.0,) * channels, std=(1.0,) * channels, augment=augment)


def make_federation(trial: Trial, whole: DataSet, smoke: bool = False) -> Federation:
    """The federation of a run, before its first round."""
    rng = np.random.default_rng(trial.seed)
    parts = divide(whole.train.y.numpy(), trial.split, CLIENTS, rng)
    used = [rng.permutation(part)[int(UNUSED * len(part)) :] for part in parts]
    local = LocalTraining(
        lr=0.01,
        lr_decay=1.0,
        momentum=0.9,
        weight_decay=1e-5,
        clip=None,
        epochs=1 if smoke else EPOCHS,
        batch_size=BATCH,
        augment=whole.augment,
    )
    model = "mlp:hidden=8" if smoke else "reproduction.anchor:lenet5"
    return Federation(
        make_model(model, whole.shape, len(whole.classes), trial.seed),
        [whole.shard(torch.from_numpy(part)) for part in used],
        "fedavg",
        local,
        active=CLIENTS,
        test=whole.test_shard(),
        seed=trial.seed,
        weighting="examples",
        execution=Execution(threads=1),
    )


@dataclass
class Runner:
    """Trains runs, each in a folder from which it is resumed.

    Attributes:
        out: Where the folders are.
        data_dir: Where the data sets are.
        smoke: Two short rounds on digits.
    """

    out: Path
    data_dir: Path | None
    smoke: bool

    def line(self, trial: Trial) -> dict[str, Any]:
        """Train a run, and return its line."""
        whole = load(trial.data, self.data_dir, self.smoke)
        federation = make_federation(trial, whole, self.smoke)
        began = time.process_time()
        records = federation.fit(2 if self.smoke else ROUNDS, self.out / trial.key, progress=False)
        evaluations = [round(100 * float(r.test_accuracy), 4) for r in records if r.test_accuracy is not None]
        made = versions()
        return {
            **dataclasses.asdict(trial),
            "mean_of_last": float(np.mean(evaluations[-5:])),
            "best": max(evaluations),
            "processor_seconds": round(time.process_time() - began, 1),
            "fingerprint": whole.fingerprint[:16],
            "commit": made["commit"],
            "torch": made["torch"],
            "command": f"python -m reproduction {NAME}",
            "evaluations": evaluations,
        }


def count(scale: str) -> tuple[int, int]:
    """Runs and rounds at a scale."""
    runs = SEEDS * len(PUBLISHED)
    return runs, runs * (2 if scale == "smoke" else ROUNDS)


def read(path: Path) -> dict[Trial, dict[str, Any]]:
    """Finished runs, from their lines."""
    lines = map(json.loads, path.read_text("utf-8").splitlines() if path.exists() else ())
    return {Trial(line["data"], line["split"], line["seed"]): line for line in lines}


def pending(path: Path, seeds: int) -> list[Trial]:
    """What is to be run, iid first."""
    done = read(path)
    order = sorted(PUBLISHED, key=lambda cell: cell[1] != "iid")
    trials = [Trial(*cell, seed) for kind in (order[:2], order[2:]) for seed in range(seeds) for cell in kind]
    return [trial for trial in trials if trial not in done]


def make_table(path: Path, seeds: int) -> ResultTable:
    """Ours beside theirs; a cell waits for its first seed, and says how many it has."""
    done = read(path)
    rows = {}
    for cell, theirs in PUBLISHED.items():
        ours = [
            line["best"] for trial, line in done.items() if (trial.data, trial.split) == cell and trial.seed < seeds
        ]
        mean = seed_mean(ours) if ours else None
        name = f"{', '.join(cell)} ({len(ours)} {'seed' if len(ours) == 1 else 'seeds'})"
        missing = Cell(None, None, *theirs, missing="not run")
        rows[name] = (missing if mean is None else Cell(mean.mean, mean.spread, *theirs),)
    return ResultTable(NAME, SHOWS, (Block("", ("best round, %",), rows),), NOTES)

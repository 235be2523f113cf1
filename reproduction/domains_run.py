"""Train heads on the frozen features of all domains but one."""

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from fedlesam import data
from fedlesam.data.dataset import DataSet, Domains, Images
from fedlesam.data.features import Request, _components
from reproduction import heads_run
from reproduction.domains import NAME, TARGETS, DomainBench
from reproduction.heads import Trial
from reproduction.heads_run import HeadTrial, Places, Problem, Runner

FILE = Request("pacs:size=96", mirror=True).file
COMPONENTS = 256


def load(data_dir: Path | None, smoke: bool = False) -> DataSet:
    """The features of PACS; embedded digits in their place, to see that it runs."""
    if not smoke:
        return data.load(f"features:{(data_dir or Path('data')) / FILE}")
    digits = heads_run.load(None, smoke=True)
    return dataclasses.replace(digits, domains=Domains(TARGETS, np.arange(len(digits.train)) % len(TARGETS)))


class DomainRunner(Runner):
    """Trains trials of the benches of one federation."""

    study: ClassVar[str] = NAME

    def selection(self) -> str:
        return f"clients={self.bench.clients}"

    @cached_property
    def projected(self) -> dict[str, DataSet]:
        """By target, filled when it is asked for."""
        return {}

    def problem(self, trial: HeadTrial) -> Problem:
        """Components, clients and held-out images of the source domains; the target is seen by the test alone."""
        bench = self.bench
        assert isinstance(trial, Trial) and isinstance(bench, DomainBench) and self.whole.domains is not None
        target = trial.split
        domains, labels = self.whole.domains, self.whole.train.y.numpy()
        if target not in self.projected:
            self.projected[target] = project(self.whole, domains.of != domains.names.index(target))
        whole, rng = self.projected[target], np.random.default_rng([trial.seed, len(labels)])
        clients, held = [], []
        for number, name in enumerate(domains.names):
            if name != target:
                aside, kept = divide(np.flatnonzero(domains.of == number), labels, bench.share, rng)
                held.append(aside)
                clients += [np.sort(part) for part in np.array_split(rng.permutation(kept), bench.clients)]
        tested = np.concatenate(held) if trial.tuning else np.flatnonzero(domains.of == domains.names.index(target))
        where = torch.from_numpy(tested)
        return Problem(dataclasses.replace(whole, test=Images(whole.train.x[where], whole.train.y[where])), clients)


def divide(places: Places, labels: Places, share: float, rng: np.random.Generator) -> tuple[Places, Places]:
    """Places of a share of each class, at least one, and those of the rest.

    Args:
        places: Of the samples of a domain.
        labels: Of all samples.
        share: From 0 to 1.
        rng: Draws them.
    """
    mixed = rng.permutation(places)
    classes = [mixed[labels[mixed] == label] for label in np.unique(labels[places])]
    counts = [max(1, round(share * len(some))) for some in classes]
    aside = np.concatenate([some[:count] for some, count in zip(classes, counts, strict=True)])
    return aside, np.concatenate([some[count:] for some, count in zip(classes, counts, strict=True)])


def project(whole: DataSet, sources: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> DataSet:
    """All samples on the principal components of the source domains, with the sources' centre and scale."""
    x, where = whole.train.x[:, 0], torch.from_numpy(sources)
    rows = x[where].flatten(0, 1)
    center, components = rows.mean(0), _components(rows, min(COMPONENTS, x.shape[2]))
    made = torch.stack([view @ components for view in (x - center).unbind(1)], 1)
    made /= made[where].std((0, 1)).square().mean().sqrt()
    return dataclasses.replace(whole, train=Images(made[:, None].contiguous(), whole.train.y))

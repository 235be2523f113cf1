"""Several methods on the same clients, batches and first model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlesam import lookup
from fedlesam.core.names import file_name
from fedlesam.federation import Record
from fedlesam.probes.catalogue import attach, fitting
from fedlesam.report import pictures
from fedlesam.report.read import Run, read_run
from fedlesam.runs import config as configs
from fedlesam.runs.build import build, load_data
from fedlesam.runs.config import RunConfig
from fedlesam.runs.runner import execute


def plan(base: RunConfig, algorithms: list[str], seeds: int) -> list[RunConfig]:
    """The runs of a comparison; a hyper-parameter goes to the methods that take it, and one nobody takes is refused."""
    if len(set(algorithms)) < len(algorithms):
        raise ValueError(f"a method is named twice: {', '.join(algorithms)}")
    takes = {name: lookup.hyperparameters(name) for name in algorithms}
    for name in base.hyper:
        if not any(name in known for known in takes.values()):
            raise ValueError(f"none of {', '.join(algorithms)} takes {name}")
    probes = {name: fitting(base.probe, lookup.get(name)) for name in algorithms}
    if base.probe not in probes.values():
        raise ValueError(f"drift: none of {', '.join(algorithms)} has a perturbation; leave the probe out")
    plans = []
    for algorithm in algorithms:
        hyper = {name: value for name, value in base.hyper.items() if name in takes[algorithm]}
        method = dataclasses.replace(base, algorithm=algorithm, hyper=hyper, probe=probes[algorithm])
        for seed in range(base.seed, base.seed + seeds):
            plans.append(configs.resolve(dataclasses.replace(method, seed=seed)))
    return plans


def folder_of(out: Path, config: RunConfig) -> Path:
    return out / f"{file_name(config.algorithm)}-seed{config.seed}"


def compare(
    plans: list[RunConfig],
    out: Path,
    *,
    overwrite: bool = False,
    watch: Callable[[RunConfig], Callable[[Record], None] | None] = lambda _: None,
) -> list[Run]:
    """Do the runs that are not done yet, one after the other, and read them all."""
    from fedlesam.runs.folder import RunFolder

    open_runs = [config for config in plans if RunFolder(folder_of(out, config)).claim(config, overwrite)]
    data = load_data(plans[0]) if open_runs else None
    for config in {config.algorithm: config for config in open_runs}.values():
        # refuses what cannot work with one method before another one has been trained
        attach(config.probe, build(config, data).federation)
    for config in open_runs:
        execute(config, folder_of(out, config), overwrite=overwrite, watch=watch(config), data=data)
    return [read_run(folder_of(out, config)) for config in plans]


def draw(runs: list[Run], out: Path) -> list[Path]:
    """The accuracy curves, and the split of the first seed."""
    config = runs[0].config
    counts = runs[0].class_counts()
    clients = config.clients if counts is None else len(counts)
    about = f"{config.data}, {config.model}, {config.split}, {clients} clients, {active(config)} active"
    drawn = [pictures.accuracy_curves(runs, out / "accuracy.png", about)]
    if counts is not None:
        classes = [str(c) for c in range(counts.shape[1])]
        title = f"{config.data}, {config.split}: samples per class and client"
        drawn.append(pictures.split_heat_map(counts, classes, out / "split.png", title))
    return drawn


def active(config: RunConfig) -> Any:
    return f"{100 * config.active:g} %" if isinstance(config.active, float) else config.active

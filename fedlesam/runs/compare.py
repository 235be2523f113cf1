"""Several methods on the same clients, batches and first model."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from fedlesam import algorithms
from fedlesam.core.names import file_name
from fedlesam.engines.stack import Stack
from fedlesam.federation import Record
from fedlesam.probes.catalogue import attach, fitting
from fedlesam.runs import config as configs
from fedlesam.runs.build import build, load_data
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.read import Run, read_run
from fedlesam.runs.runner import execute
from fedlesam.runs.together import companies, train_together


def plan(base: RunConfig, methods: list[str], seeds: int) -> list[RunConfig]:
    """The runs of a comparison; a hyper-parameter goes to the methods that take it, and one nobody takes is refused.

    Args:
        base: Settings of all runs, not resolved.
        methods: Names of methods.
        seeds: Runs per method, from the seed of `base` on.
    """
    if len(set(methods)) < len(methods):
        raise ValueError(f"a method is named twice: {', '.join(methods)}")
    takes = {name: algorithms.hyperparameters(name) for name in methods}
    for name in base.hyper:
        if not any(name in known for known in takes.values()):
            raise ValueError(f"none of {', '.join(methods)} takes {name}")
    probes = {name: fitting(base.probe, algorithms.get(name)) for name in methods}
    if base.probe not in probes.values():
        raise ValueError(f"drift: none of {', '.join(methods)} has a perturbation; leave the probe out")
    plans = []
    for algorithm in methods:
        hyper = {name: value for name, value in base.hyper.items() if name in takes[algorithm]}
        method = dataclasses.replace(base, algorithm=algorithm, hyper=hyper, probe=probes[algorithm])
        for seed in range(base.seed, base.seed + seeds):
            plans.append(configs.resolve(dataclasses.replace(method, seed=seed)))
    return plans


def prepare(base: RunConfig, methods: list[str], seeds: int, out: Path | None = None) -> tuple[list[RunConfig], Path]:
    """The runs of a comparison and its folder; threads that were not given stay what an earlier call began with.

    Args:
        base: Settings of all runs, not resolved.
        methods: Names of methods.
        seeds: Runs per method, from the seed of `base` on.
        out: The folder; None names it after the settings.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("under torchrun use `fedlesam run`, one method at a time; `compare` takes --workers instead")
    plans = plan(base, methods, seeds)
    name = hashlib.sha256("".join(configs.identity(plan) for plan in plans).encode()).hexdigest()[:8]
    out = out or Path("runs") / f"compare-{file_name(base.data)}-{name}"
    began = next((folder for p in plans if (folder := RunFolder(folder_of(out, p))).config.exists()), None)
    if base.threads is None and began is not None:
        threads = began.read_config().threads
        plans = [dataclasses.replace(plan, threads=threads) for plan in plans]
    return plans, out


def folder_of(out: Path, config: RunConfig) -> Path:
    """The folder of one run of a comparison.

    Args:
        out: The comparison's folder.
        config: Settings of a run.
    """
    return out / f"{file_name(config.algorithm)}-seed{config.seed}"


def compare(
    plans: list[RunConfig],
    out: Path,
    *,
    overwrite: bool = False,
    watch: Callable[[RunConfig], Callable[[Record], None] | None] = lambda _: None,
) -> list[Run]:
    """Do the runs that are not done yet, one after the other or together, and read them all.

    Args:
        plans: The runs, as of `prepare`.
        out: The comparison's folder.
        overwrite: Whether to replace what the folder holds.
        watch: Returns, for a run that begins, what is called with each of its records.
    """
    open_runs = [config for config in plans if RunFolder(folder_of(out, config)).needs_run(config, overwrite)]
    data = load_data(plans[0]) if open_runs else None
    for config in {config.algorithm: config for config in open_runs}.values():
        # refuses what cannot work with one method before another one has been trained
        attach(config.probe, build(config, data).federation)
    wrong: list[BaseException] = []

    def run(config: RunConfig, stack: Stack | None) -> None:
        try:
            path = folder_of(out, config)
            execute(config, path, overwrite=overwrite, watch=watch(config), data=data, stack=stack)
        except BaseException as error:
            if stack is None:
                raise
            wrong.append(error)

    for company in companies(open_runs):
        train_together(open_runs[company[0]], [functools.partial(run, open_runs[i]) for i in company])
        if wrong:
            raise wrong[0]
    return [read_run(folder_of(out, config)) for config in plans]

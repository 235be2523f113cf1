"""Several methods on the same clients, batches and first model."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from fedlesam import algorithms
from fedlesam.core.computing import settled_objects
from fedlesam.core.names import file_name
from fedlesam.engines.stack import Stack
from fedlesam.federation import Record
from fedlesam.probes.catalogue import attach, fitting
from fedlesam.runs import config as configs
from fedlesam.runs import order
from fedlesam.runs.build import build, load_data
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.kinds import Value
from fedlesam.runs.read import Run, read_run
from fedlesam.runs.runner import execute
from fedlesam.runs.together import companies, train_together

Plans = dict[str, RunConfig]
"""The runs of a comparison, by the names of their folders."""


def parse_method(text: str) -> tuple[str, dict[str, Value]]:
    """`fedsam`, or `fedsam:rho=0.05,lr_g=1` with hyper-parameters: the name and their values.

    Args:
        text: What was typed; `module:callable` may stand for a name.
    """
    name, colon, values = text.rpartition(":")
    if not colon or "=" not in values:
        return text, {}
    hyper = {}
    for pair in values.split(","):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"method {text!r}: expected NAME:KEY=VALUE,..., got {pair!r}; e.g. fedsam:rho=0.05")
        hyper[key.strip()] = configs.parse(key.strip(), value.strip(), f"method {text!r}")
    return name, hyper


def plan(base: RunConfig, methods: list[str], seeds: int) -> Plans:
    """The runs of a comparison; a hyper-parameter goes to the methods that take it, and one nobody takes is refused.

    Args:
        base: Settings of all runs, not resolved.
        methods: Names of methods, with hyper-parameters of their own or not: `fedsam`, `fedsam:rho=0.05`.
        seeds: Runs per method, from the seed of `base` on.
    """
    parsed = {text: parse_method(text) for text in methods}
    takes = {text: algorithms.hyperparameters(name) for text, (name, _) in parsed.items()}
    for key in base.hyper:
        if not any(key in known for known in takes.values()):
            raise ValueError(f"none of {', '.join(methods)} takes {key}")
    hypers = {
        text: {**{key: value for key, value in base.hyper.items() if key in takes[text]}, **own}
        for text, (_, own) in parsed.items()
    }
    probes = {text: fitting(base.probe, algorithms.get(name, **hypers[text])) for text, (name, _) in parsed.items()}
    if base.probe not in probes.values():
        raise ValueError(f"drift: none of {', '.join(methods)} has a perturbation; leave the probe out")
    plans: Plans = {}
    for text in methods:
        name = parsed[text][0]
        method = dataclasses.replace(base, algorithm=name, hyper=hypers[text], probe=probes[text])
        for seed in range(base.seed, base.seed + seeds):
            config = configs.resolve(dataclasses.replace(method, seed=seed))
            if config in plans.values():
                raise ValueError(f"a method is named twice: {', '.join(methods)}")
            plans[f"{file_name(text)}-seed{seed}"] = config
    return plans


def prepare(base: RunConfig, methods: list[str], seeds: int, out: Path | None = None) -> tuple[Plans, Path]:
    """The runs of a comparison and its folder; threads that were not given stay what an earlier call began with.

    Args:
        base: Settings of all runs, not resolved.
        methods: Names of methods, with hyper-parameters of their own or not.
        seeds: Runs per method, from the seed of `base` on.
        out: The folder; None names it after the settings.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("under torchrun use `fedlesam run`, one method at a time; `compare` takes --workers instead")
    plans = plan(base, methods, seeds)
    name = hashlib.sha256("".join(configs.identity(plan) for plan in plans.values()).encode()).hexdigest()[:8]
    out = out or Path("runs") / f"compare-{file_name(base.data)}-{name}"
    began = next((folder for folder in (RunFolder(out / name) for name in plans) if folder.config.exists()), None)
    if base.threads is None and began is not None:
        threads = began.read_config().threads
        plans = {name: dataclasses.replace(plan, threads=threads) for name, plan in plans.items()}
    return plans, out


def compare(
    plans: Plans,
    out: Path,
    *,
    overwrite: bool = False,
    watch: Callable[[str, RunConfig], Callable[[Record], None] | None] = lambda _, __: None,
) -> list[Run]:
    """Do the runs that are not done yet, one after the other or together, and read them all.

    Args:
        plans: The runs, as of `prepare`.
        out: The comparison's folder.
        overwrite: Whether to replace what the folder holds.
        watch: Returns, for the name and settings of a run that begins, what is called with each of its records.
    """
    left = {name: plan for name, plan in plans.items() if RunFolder(out / name).needs_run(plan, overwrite)}
    data = load_data(next(iter(left.values()))) if left else None
    for config in {(config.algorithm, str(config.hyper)): config for config in left.values()}.values():
        # refuses what cannot work with one method before another one has been trained
        attach(config.probe, build(config, data).federation)
    wrong: list[BaseException] = []

    def run(name: str, stack: Stack | None) -> None:
        try:
            shown = watch(name, left[name])
            execute(left[name], out / name, overwrite=overwrite, watch=shown, data=data, stack=stack)
        except BaseException as error:
            if stack is None:
                raise
            wrong.append(error)

    order.keep(out, plans)
    names, open_runs = list(left), list(left.values())
    with settled_objects:
        for company in companies(open_runs):
            train_together(open_runs[company[0]], [functools.partial(run, names[i]) for i in company])
            if wrong:
                raise wrong[0]
    return [read_run(out / name) for name in plans]

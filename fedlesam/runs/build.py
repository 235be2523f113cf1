"""From settings to a federation that is ready to train."""

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlesam import algorithms
from fedlesam.core.hold_out import check_share
from fedlesam.core.local import LocalTraining
from fedlesam.core.names import imported
from fedlesam.data import catalogue, dataset
from fedlesam.data.dataset import DataSet, Shard
from fedlesam.data.splits import Split, make_split
from fedlesam.engines.settings import Execution, FailurePolicy, find_device
from fedlesam.engines.stack import Stack
from fedlesam.engines.world import World
from fedlesam.federation import Federation
from fedlesam.models.catalogue import make_model
from fedlesam.runs import config as configs
from fedlesam.runs import tasks
from fedlesam.runs.config import RunConfig

log = logging.getLogger("fedlesam")


@dataclass(frozen=True)
class Experiment:
    """A data set, its split, and the federation that trains on it."""

    data: DataSet
    """The data set."""
    split: Split
    """Which client has which samples."""
    federation: Federation
    """Ready to train."""


def load_data(config: RunConfig) -> DataSet:
    """The data set of a run: the samples chosen, or held out.

    Args:
        config: Settings of a run.
    """
    known = {name.partition(":")[0] for name in catalogue.NAMES} - {"digits"}  # the embedded set is there at once
    if config.data.partition(":")[0] in known:
        log.info("loading %s", config.data, extra={"without_bar": True})
    whole = catalogue.load(config.data, Path(config.data_dir) if config.data_dir else None)
    return dataset.select(whole, config.samples, config.held_out)


def build(
    config: RunConfig,
    data: DataSet | None = None,
    *,
    folder: Path | None = None,
    world: World | None = None,
    stack: Stack | None = None,
) -> Experiment:
    """All of a resolved config is checked here, before anything is written.

    Args:
        config: Resolved settings.
        data: The data set, if it is loaded already.
        folder: For the clients' memory beyond the budget; without one all of it stays in RAM.
        world: The processes that torchrun started, if it did.
        stack: What the run shares with others of a sweep.
    """
    if config.split == "python":
        raise ValueError("this run was made in Python; make its federation again, and call fit(rounds, out=FOLDER)")
    device = find_device(config.device)
    configs.check(config)
    algorithm = algorithms.get(config.algorithm, **config.hyper)
    if config.steps is not None and config.epochs is not None:
        raise ValueError(f"--steps {config.steps} and --epochs {config.epochs}: give one of the two")
    sizes = {"epochs": _epochs(config.epochs), "batch_size": 50 if config.batch_size is None else config.batch_size}
    local = LocalTraining(**{**_shared(config, LocalTraining), **sizes, "clip": config.clip or None, "augment": None})
    local.check(algorithm, config.rounds)
    data = data or load_data(config)
    if config.augment and data.augment is not None:
        local = replace(local, augment=data.augment)
    split = make_split(config.split, data, config.clients, config.seed)
    if config.client_test is not None:
        split = split.hold_out(check_share(config.client_test, "--client-test"), config.seed)
    model = make_model(config.model, data.shape, data.outputs, config.seed, data.tokens).to(device)
    place = {"device": None, "folder": folder, "memory": config.memory if folder is not None else None}
    federation = Federation(
        model,
        split.shards(data),
        algorithm,
        local,
        task=tasks.task_of(config.task, config.metric),
        active=config.active,
        sampling=None if config.sampling is None else imported("sampling", config.sampling),
        test=_test(data, split),
        test_clients=split.test_shards(data),
        seed=config.seed,
        weighting=config.weighting,
        evaluate_every=config.evaluate_every,
        per_client=config.per_client,
        failures=FailurePolicy(config.on_client_error, config.dropout, config.max_update_norm or None),
        execution=Execution(**{**_shared(config, Execution), **place}),
        _world=world,
        _stack=stack,
    )
    return Experiment(data, split, federation)


def _test(data: DataSet, split: Split) -> Shard | None:
    """The common test data; None where clients have all of them, and so test on them once.

    Of images held out those of the domain that is left out for the test have no part in it.
    """
    if split.test is not None and data.domains is not None and data.domains.held is not None:
        held, target = data.domains.held, data.domains.of[split.test[0]]
        places = np.flatnonzero((held >= 0) & (held != target))
        if not len(places):
            raise ValueError(f"--held-out: all {len(held)} images held out are of the domain left out; hold out more")
        return data.test_shard(torch.from_numpy(places))
    if split.test is not None:
        return data.shard(torch.from_numpy(split.test))
    own = 0 if split.tests is None or split.tests_in == "train" else sum(map(len, split.tests))
    return None if own and own == len(data.test) else data.test_shard()


def _shared(config: RunConfig, owner: type[LocalTraining | Execution]) -> dict[str, Any]:
    """The settings that have the same name in both."""
    return {field.name: getattr(config, field.name) for field in fields(owner) if hasattr(config, field.name)}


def _epochs(epochs: int | float | str | None) -> int | float | range:
    if isinstance(epochs, str):
        low, high = (int(part) for part in epochs.split("-"))
        if not 1 <= low <= high:
            raise ValueError(f"epochs: the range {epochs} must run upwards from at least 1, e.g. 1-5")
        return range(low, high + 1)
    return 5 if epochs is None else epochs

"""From settings to a federation that is ready to train."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fedlesam import algorithms
from fedlesam.core.local import LocalTraining
from fedlesam.data import catalogue, dataset
from fedlesam.data.dataset import DataSet
from fedlesam.data.splits import Split, make_split
from fedlesam.engines.settings import Execution, FailurePolicy, find_device
from fedlesam.engines.world import World
from fedlesam.federation import Federation
from fedlesam.models.catalogue import make_model
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig


@dataclass(frozen=True)
class Experiment:
    data: DataSet
    split: Split
    federation: Federation


def load_data(config: RunConfig) -> DataSet:
    whole = catalogue.load(config.data, Path(config.data_dir) if config.data_dir else None)
    return dataset.select(whole, config.samples, config.held_out)


def build(
    config: RunConfig, data: DataSet | None = None, *, folder: Path | None = None, world: World | None = None
) -> Experiment:
    """All of a resolved config is checked here, before anything is written. `data` saves loading it again.

    `folder` is for the clients' memory beyond the budget; without one all of it stays in RAM.
    """
    device = find_device(config.device)
    configs.check(config)
    algorithm = algorithms.get(config.algorithm, **config.hyper)
    local = LocalTraining(
        lr=config.lr,
        lr_decay=config.lr_decay,
        epochs=_epochs(config.epochs),
        batch_size=50 if config.batch_size is None else config.batch_size,
        weight_decay=config.weight_decay,
        clip=config.clip or None,
        clip_scope=config.clip_scope,
        momentum=config.momentum,
    )
    local.check_decay(algorithm, config.rounds)
    data = data or load_data(config)
    if config.augment and data.augment is not None:
        local = LocalTraining(**{**vars(local), "augment": data.augment})
    split = make_split(config.split, data, config.clients, config.seed)
    model = make_model(config.model, data.shape, len(data.classes), config.seed).to(device)
    federation = Federation(
        model,
        [data.shard(torch.from_numpy(indices)) for indices in split.clients],
        algorithm,
        local,
        active=config.active,
        test=data.test_shard() if split.test is None else data.shard(torch.from_numpy(split.test)),
        seed=config.seed,
        weighting=config.weighting,
        evaluate_every=config.evaluate_every,
        per_client=config.per_client,
        failures=FailurePolicy(
            on_error=config.on_client_error,
            dropout=config.dropout,
            max_update_norm=config.max_update_norm or None,
        ),
        execution=Execution(
            workers=config.workers,
            threads=config.threads,
            engine=config.engine,
            precision=config.precision,
            compile=config.compile,
            store=config.store,
            memory=config.memory if folder is not None else None,
            folder=folder,
            lost_after=config.lost_after,
        ),
        _world=world,
    )
    return Experiment(data, split, federation)


def _epochs(epochs: int | str | None) -> int | range:
    if isinstance(epochs, str):
        low, high = (int(part) for part in epochs.split("-"))
        if not 1 <= low <= high:
            raise ValueError(f"epochs: the range {epochs} must run upwards from at least 1, e.g. 1-5")
        return range(low, high + 1)
    return 5 if epochs is None else epochs

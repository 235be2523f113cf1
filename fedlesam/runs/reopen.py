"""A run folder made into a federation that probes can look at. Nothing in the folder is changed."""

import dataclasses
from pathlib import Path

from fedlesam.core.flat_model import FlatModel
from fedlesam.data.dataset import DataSet
from fedlesam.federation import Federation
from fedlesam.probes.base import Look
from fedlesam.runs import config as configs
from fedlesam.runs.build import Experiment, build
from fedlesam.runs.checkpoint import Checkpoints
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import made_of


def read_config(path: Path, data_dir: str | None = None, device: str | None = None) -> RunConfig:
    """Of a run folder, to be looked at here: one process, no files.

    Args:
        path: The run folder.
        data_dir: Where the files of the data set are, if not where the run found them.
        device: `cpu`, `cuda` or `cuda:i`, if not that of the run.
    """
    known = RunFolder(path).read_config()
    threads = 1 if known.threads is None and known.workers > 1 else None  # as its workers have
    here = {"data_dir": data_dir, "device": device, "workers": 1, "threads": threads}
    return configs.update(known, {**here, "store": "shared", "compile": False})


def open_run(path: Path, config: RunConfig | None = None, data: DataSet | None = None) -> Federation:
    """The run's clients, settings and global model; what clients remember is not in it.

    Args:
        path: The run folder.
        config: As of `read_config`, if it is read already.
        data: The data set, if it is loaded already.
    """
    experiment = _open(path, config, data)
    if _at_checkpoint(RunFolder(path), experiment, memories=False) is None:
        at_model(RunFolder(path), experiment.federation)
    return experiment.federation


def open_between_rounds(path: Path, config: RunConfig | None = None, data: DataSet | None = None) -> Look:
    """A run as a probe saw it while it trained, at its newest checkpoint: with what clients remember.

    The model of the round before is there if the run has a probe that asks for it, if a checkpoint of that round is
    there, or if a client keeps it (FedLESAM).

    Args:
        path: The run folder.
        config: As of `read_config`, if it is read already.
        data: The data set, if it is loaded already.
    """
    folder, experiment = RunFolder(path), _open(path, config, data)
    federation = experiment.federation
    checkpoints = _at_checkpoint(folder, experiment, memories=True)
    if checkpoints is None:
        raise ValueError(
            f"{path}: has no checkpoint, so its clients' memories are gone; measure it while training, with "
            "`fedlesam run --probe drift:every=10`, or train without --no-keep"
        )
    state, previous = federation.state, checkpoints.previous
    if previous is None:
        before = checkpoints.state_at(state.round - 1, state)
        previous = federation.memories.anchor(state.round - 1) if before is None else before.weights
    return Look(federation, None if previous is None else previous.to(state.weights.device))


def moved(federation: Federation, model: Federation) -> Federation:
    """The clients of one federation with the global model of another: to measure two models on the same samples.

    Args:
        federation: Whose clients stay.
        model: Whose global model is taken.
    """
    state, new = federation.state, model.state
    if state.weights.shape != new.weights.shape:
        raise ValueError(f"a model of {new.weights.numel():,} weights cannot replace one of {state.weights.numel():,}")
    federation.state = dataclasses.replace(state, round=new.round, weights=new.weights, buffers=new.buffers)
    return federation


def _open(path: Path, config: RunConfig | None, data: DataSet | None) -> Experiment:
    experiment = build(config or read_config(path), data)
    split = RunFolder(path).read_summary().get("split") or {}
    for what, here in (("hash", experiment.split.hash), ("data", made_of(experiment).samples)):
        if split.get(what, here) != here:
            raise ValueError(
                f"{path}: the data or the split are not those of the run: its split has the {what} {split[what]}, "
                f"here it is {here}"
            )
    return experiment


def _at_checkpoint(folder: RunFolder, experiment: Experiment, *, memories: bool) -> Checkpoints | None:
    """The checkpoints of which the newest was taken up."""
    if folder.is_finished() and not memories:
        return None
    settings, older = configs.settings_of(folder.read_config())
    metadata = made_of(experiment).metadata(settings)
    checkpoints = Checkpoints(folder.checkpoints, metadata=metadata, older=older)
    return checkpoints if checkpoints.read_newest(experiment.federation, memories) else None


def at_model(folder: RunFolder, federation: Federation) -> None:
    """Put a federation where the model of the folder is: of the end, or of where it was interrupted.

    Args:
        folder: The run folder.
        federation: One made from the same settings.
    """
    module = federation.model
    folder.load_model(module)
    flat, rounds = FlatModel(module), int(folder.read_summary().get("rounds", 0))
    federation.state = dataclasses.replace(
        federation.state, round=rounds, weights=flat.weights.clone(), buffers=flat.buffers()
    )

"""A run folder made into a federation that probes can look at."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor

from fedlesam import config as configs
from fedlesam.build import build
from fedlesam.checkpoint import Checkpoints
from fedlesam.config import RunConfig
from fedlesam.data.dataset import DataSet
from fedlesam.federation import Federation
from fedlesam.models.flat import FlatModel
from fedlesam.runs import RunFolder


def read_config(path: Path, data_dir: str | None = None, device: str | None = None) -> RunConfig:
    """Of a run folder, to be looked at here: one process, no files."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ValueError(f"{path}: is not a run folder, it has no config.toml")
    here = {"data_dir": data_dir, "device": device, "workers": 1}
    return configs.update(folder.read_config(), {**here, "store": "shared", "compile": False})


def open_run(path: Path, config: RunConfig | None = None, data: DataSet | None = None) -> Federation:
    """The run's clients, settings and global model; what clients remember is not in it. `data` saves loading it."""
    folder = RunFolder(path)
    config = config or read_config(path)
    experiment = build(config, data)
    known = folder.read_summary().get("split", {}).get("hash")
    if known is not None and known != experiment.split.hash:
        raise ValueError(
            f"{path}: the data or the split are not those of the run: its split has the hash {known}, "
            f"here it is {experiment.split.hash}"
        )
    federation = experiment.federation
    rounds, weights, buffers = weights_of(folder, federation)
    federation.state = dataclasses.replace(federation.state, round=rounds, weights=weights, buffers=buffers)
    return federation


def weights_of(folder: RunFolder, federation: Federation) -> tuple[int, Tensor, Mapping[str, Tensor]]:
    """The rounds done, the weights and the buffers after them: of the end, or of the newest checkpoint."""
    saved = None if folder.is_finished() else Checkpoints(folder.checkpoints).newest(federation)
    if saved is not None:
        return saved.round, saved.weights, saved.buffers
    if not folder.model.exists():
        raise ValueError(
            f"{folder.path}: has no weights yet, no checkpoint and no model.safetensors; let it train, or interrupt it"
        )
    module = copy.deepcopy(federation.model)
    try:
        load_model(module, str(folder.model))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ValueError(
            f"{folder.model}: is not the model of {folder.config}: {str(error).splitlines()[0]}"
        ) from error
    flat = FlatModel(module)
    return int(folder.read_summary().get("rounds", 0)), flat.weights.clone(), flat.buffers()

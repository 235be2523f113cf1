"""What both apps must agree on: the data and their split, the model, how a client trains."""

from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import nn

from fedlesam.core.local import LocalTraining
from fedlesam.data import catalogue
from fedlesam.data.dataset import DataSet, Shard
from fedlesam.data.splits import make_split
from fedlesam.models.catalogue import make_model


def load(config: dict[str, Any], folder: str = "") -> DataSet:
    folder = folder or str(config["data-dir"])
    return catalogue.load(str(config["data"]), Path(folder) if folder else None)


def load_client(context: Context) -> Shard:
    """This node's part. A node of your own reads its own data here; the split stands in for that."""
    config, client = context.run_config, int(context.node_config["partition-id"])
    data = load(config, str(context.node_config.get("data-dir", "")))
    split = make_split(str(config["split"]), data, int(config["clients"]), int(config["seed"]))
    return data.shard(torch.from_numpy(split.clients[client]))


def model_for(config: dict[str, Any], data: DataSet) -> nn.Module:
    return make_model(str(config["model"]), data.shape, len(data.classes), int(config["seed"]))


def client_model(context: Context) -> nn.Module:
    """On a GPU where there is one; `device` of the node config decides otherwise."""
    data = load(context.run_config, str(context.node_config.get("data-dir", "")))
    return model_for(context.run_config, data).to("cuda" if torch.cuda.is_available() else "cpu")


def local_training(context: Context) -> LocalTraining:
    config = context.run_config
    return LocalTraining(lr=float(config["lr"]), epochs=int(config["epochs"]), batch_size=int(config["batch-size"]))

"""A small Flower app on the embedded digits, for `fedlesam deploy try` without an app of one's own."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedlesam.core.batches import Batches
from fedlesam.core.evaluation import combine, score_batches
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.data import catalogue
from fedlesam.data.dataset import Shard
from fedlesam.data.splits import make_split
from fedlesam.flower import Strategy, client_app
from fedlesam.models.catalogue import make_model

PYPROJECT = """\
[project]
name = "digits"
version = "0.1.0"
description = "a small app on the embedded digits"
license = "Apache-2.0"
dependencies = ["fedlesam[flower]"]

[tool.flwr.app]
publisher = "fedlesam"

[tool.flwr.app.components]
serverapp = "digits:server"
clientapp = "digits:client"

[tool.flwr.app.config]
algorithm = "fedlesam-s"
clients = 3
rounds = 5
"""
MODULE = """\
from fedlesam.flower import sample

server = sample.server
client = sample.client
"""


def write_sample(folder: Path) -> None:
    """Write the app's folder.

    Args:
        folder: an empty one.
    """
    (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (folder / "digits.py").write_text(MODULE, encoding="utf-8")


def _model(context: Context | None = None) -> torch.nn.Module:
    data = catalogue.load("digits")
    return make_model("mlp", data.shape, len(data.classes), seed=0)


def _load_client(context: Context) -> Shard:
    data = catalogue.load("digits")
    split = make_split("dirichlet:0.5", data, int(context.run_config["clients"]), seed=0)
    return data.shard(torch.from_numpy(split.clients[int(context.node_config["partition-id"])]))


client = client_app(_model, _load_client, LocalTraining(lr=0.1, epochs=2), threads=1)
server = ServerApp()


@server.main()
def _serve(grid: Grid, context: Context) -> None:
    config, tested = context.run_config, FlatModel(_model())
    torch.set_num_threads(1)

    def evaluate(rounds: int, arrays: ArrayRecord) -> MetricRecord:
        tested.module.load_state_dict(arrays.to_torch_state_dict())
        test = Batches(catalogue.load("digits").test_shard(), tested.device)
        found = combine(score_batches(tested, test, torch.nn.functional.cross_entropy))
        return MetricRecord({"test-loss": found.loss, "test-accuracy": float(found.accuracy or 0.0)})

    strategy = Strategy(_model(), str(config["algorithm"]), clients=int(config["clients"]), patience=120)
    strategy.start(grid, num_rounds=int(config["rounds"]), timeout=600, evaluate_fn=evaluate)

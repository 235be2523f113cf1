"""The app of the SuperLink."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from fedlesam.core.batches import Batches
from fedlesam.core.evaluation import combine, score_batches
from fedlesam.core.flat_model import FlatModel
from fedlesam.flower import Strategy
from flower_cifar.task import load, model_for

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.set_num_threads(1)
    data = load(config)
    model = model_for(config, data)
    tested = FlatModel(model_for(config, data))

    def evaluate(rounds: int, arrays: ArrayRecord) -> MetricRecord:
        tested.module.load_state_dict(arrays.to_torch_state_dict())
        test = Batches(data.test_shard(), tested.device)
        found = combine(score_batches(tested, test, torch.nn.functional.cross_entropy))
        return MetricRecord({"test-loss": found.loss, "test-accuracy": float(found.accuracy or 0.0)})

    folder = Path(str(config["folder"])) if config["folder"] else None
    strategy = Strategy(
        model,
        str(config["algorithm"]),
        clients=int(config["clients"]),
        active=config["active"],
        minimum=config["minimum"],
        seed=int(config["seed"]),
        patience=float(config["patience"]),
        folder=folder,
    )
    rounds, timeout = int(config["rounds"]), float(config["timeout"])
    result = strategy.start(grid, num_rounds=rounds, timeout=timeout, evaluate_fn=evaluate)
    if folder is not None:
        save_file(result.arrays.to_torch_state_dict(), folder / "model.safetensors")

"""Rounds on a GPU: with and without CUDA graphs, and in each precision, against the bare PyTorch loop.

    python benchmarks/gpu.py [--models mlp cnn resnet18] [--turns 7] [--device cuda]

2 clients x 500 samples of CIFAR-10's size, batch 50, 50 steps per client. The bare loop has its samples on the device,
forward, backward, clip_grad_norm_ and SGD, and one read at the end of a client. With --device cpu it shows that the
script runs; graphs are then off everywhere.
"""

import argparse
import copy
from typing import get_args

import torch
import torch.nn.functional as F
from measure import machine, table, take_turns
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.core.choices import Precision
from fedlesam.models.catalogue import make_model

CLIENTS, BATCH, SIZE = 2, 50, 500


def bare(model: nn.Module, data: list[tuple[Tensor, Tensor]], epochs: int) -> None:
    for x, y in data:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
        for _ in range(epochs):
            for indices in torch.randperm(len(x), device=x.device).split(BATCH):
                optimiser.zero_grad()
                F.cross_entropy(model(x[indices]), y[indices]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimiser.step()
        assert next(model.parameters()).isfinite().all()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=["mlp", "cnn", "resnet18"])
    arguments.add_argument("--turns", type=int, default=7)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--epochs", type=int, default=5)
    options = arguments.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; --device cpu shows that the script runs")
    print(machine(), torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(SIZE, 3, 32, 32, generator=draw), torch.randint(0, 10, (SIZE,), generator=draw)
    data = [(x.to(device), y.to(device))] * CLIENTS
    local = fl.LocalTraining(epochs=options.epochs, batch_size=BATCH, lr_decay=1.0, lr=0.01)
    for spec in options.models:
        model = make_model(spec, (3, 32, 32), 10, 0).to(device)
        last = copy.deepcopy(model)
        candidates = {"bare loop": lambda: bare(last, data, options.epochs)}  # noqa: B023
        settings = [("fedavg", graphs, "fp32") for graphs in (False, True)]
        settings += [("fedavg", True, precision) for precision in get_args(Precision) if precision != "fp32"]
        settings += [(method, graphs, "fp32") for method in ("fedsam", "fedlesam-s") for graphs in (False, True)]
        for method, graphs, precision in settings:
            how = fl.Execution(cuda_graphs=graphs, precision=precision)
            fed = fl.Federation(model, data, method, local, execution=how)
            candidates[f"{method}, {precision}, graphs {'on' if graphs else 'off'}"] = fed.round
        print(
            table(f"{spec}, {SIZE // BATCH * options.epochs} steps", take_turns(candidates, options.turns)), flush=True
        )


main()

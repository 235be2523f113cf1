"""A FedAvg round against the bare PyTorch loop that does the same batches.

    python benchmarks/overhead.py [--models cnn lenet resnet18] [--turns 7]

The bare loop has forward, backward, clip_grad_norm_ and SGD with weight decay, and nothing else: no server, no memory,
no sums. It gets its better memory layout. One thread.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from measure import machine, table, take_turns
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.core import seeds
from fedlesam.core.batches import batch_indices
from fedlesam.models.catalogue import make_model

CLIENTS, BATCH = 2, 50


def bare(model: nn.Module, data: list[tuple[Tensor, Tensor]], epochs: int, channels_last: bool) -> None:
    for client, (x, y) in enumerate(data):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
        draw = seeds.generator(0, "batches", 0, client)
        for indices in batch_indices(len(x), BATCH, epochs, False, draw):
            batch = x[indices]
            if channels_last:
                batch = batch.contiguous(memory_format=torch.channels_last)
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(model(batch), y[indices]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimiser.step()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=["cnn", "lenet", "resnet18"])
    arguments.add_argument("--turns", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for spec in options.models:
        for steps in (10, 50):
            draw = torch.Generator().manual_seed(0)
            x, y = torch.randn(500, 3, 32, 32, generator=draw), torch.randint(0, 10, (500,), generator=draw)
            data, epochs = [(x, y)] * CLIENTS, steps // 10
            model = make_model(spec, (3, 32, 32), 10, 0)
            local = fl.LocalTraining(epochs=epochs, batch_size=BATCH, lr_decay=1.0)
            fed = fl.Federation(model, data, "fedavg", local, execution=fl.Execution(threads=1))
            plain, last = copy.deepcopy(model), copy.deepcopy(model)
            candidates = {
                "bare loop, channels-last": lambda: bare(last, data, epochs, True),  # noqa: B023
                "bare loop, contiguous": lambda: bare(plain, data, epochs, False),  # noqa: B023
                "fedavg round": fed.round,
            }
            timings = take_turns(candidates, options.turns)
            best = min(timings[:2], key=lambda t: t.seconds)
            note = f"Against the better bare loop ({best.name}): **{timings[2].ratio / best.ratio:.3f}**"
            print(table(f"{spec}, {steps} steps per client", timings, note), flush=True)


main()

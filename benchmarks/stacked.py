"""Would training the active clients of a tiny model as one batched computation pay?

    python benchmarks/stacked.py [--turns 7]

The same local steps of FedAvg, once by the plain loop over clients and once with torch.func: the clients' weights are
stacked and the gradient is taken for all of them at once by vmap. One thread. The bar was twice as fast.
"""

import argparse

import torch
import torch.nn.functional as F
from measure import machine, table, take_turns
from torch import Tensor
from torch.func import functional_call, grad, vmap

import fedlesam as fl
from fedlesam.models.catalogue import make_model

CLIENTS, SIZE, BATCH = 100, 20, 10


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--turns", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for spec, shape in (("mlp", (1, 8, 8)), ("cnn", (1, 8, 8)), ("cnn", (3, 32, 32))):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(CLIENTS, SIZE, *shape, generator=draw)
        y = torch.randint(0, 10, (CLIENTS, SIZE), generator=draw)
        model = make_model(spec, shape, 10, 0)
        local = fl.LocalTraining(epochs=2, batch_size=BATCH)
        fed = fl.Federation(model, list(zip(x, y, strict=True)), "fedavg", local, threads=1)
        names = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x,)), y)  # noqa: B023

        gradients = vmap(grad(loss))

        def stacked() -> None:
            weights = {k: w.expand(CLIENTS, *w.shape).clone() for k, w in names.items()}  # noqa: B023
            for _ in range(2):
                for start in range(0, SIZE, BATCH):
                    cut = slice(start, start + BATCH)
                    g = gradients(weights, x[:, cut], y[:, cut])  # noqa: B023
                    square = sum((part.flatten(1) ** 2).sum(1) for part in g.values())
                    scale = (10.0 / (torch.as_tensor(square).sqrt() + 1e-6)).clamp(max=1.0)
                    for k, w in weights.items():
                        w.mul_(1 - 1e-4).sub_(0.1 * scale.view(-1, *[1] * (w.ndim - 1)) * g[k])

        timings = take_turns({"plain loop": fed.round, "stacked": stacked}, options.turns)
        note = f"stacked is **{1 / timings[1].ratio:.2f}** times as fast as the plain loop."
        print(table(f"{spec} on {shape}, {CLIENTS} clients x 4 steps of {BATCH}", timings, note), flush=True)


main()

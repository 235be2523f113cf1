"""Training the active clients of a small model as one batched computation against the plain loop.

    python benchmarks/stacked.py [--turns 7]

The two engines of this package on the same rounds, one thread. The stacked one was to ship if it is twice as fast
somewhere.
"""

import argparse

import torch
from measure import machine, table, take_turns

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
        model, clients = make_model(spec, shape, 10, 0), list(zip(x, y, strict=True))
        local = fl.LocalTraining(epochs=2, batch_size=BATCH)
        for method in ("fedavg", "fedlesam-s", "fedsam"):
            plain = fl.Federation(model, clients, method, local, execution=fl.Execution(threads=1))
            stacked = fl.Federation(model, clients, method, local, execution=fl.Execution(threads=1, engine="stacked"))
            timings = take_turns({"plain": plain.round, "stacked": stacked.round}, options.turns, warm_up=2)
            note = f"stacked is **{1 / timings[1].ratio:.2f}** times as fast as the plain loop."
            title = f"{method}, {spec} on {shape}, {CLIENTS} clients x 4 steps of {BATCH}"
            print(table(title, timings, note), flush=True)


main()

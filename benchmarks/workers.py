"""One round with one and with two workers, one thread each.

python benchmarks/workers.py [--models cnn resnet18] [--turns 5]
"""

import argparse

import torch
from measure import machine, table, take_turns

import fedlesam as fl
from fedlesam.models.catalogue import make_model

ONE_THREAD = fl.Execution(threads=1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=["cnn", "resnet18"])
    arguments.add_argument("--turns", type=int, default=5)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for spec in options.models:
        draw = torch.Generator().manual_seed(0)
        x, y = torch.randn(250, 3, 32, 32, generator=draw), torch.randint(0, 10, (250,), generator=draw)
        model, local = make_model(spec, (3, 32, 32), 10, 0), fl.LocalTraining(epochs=1, batch_size=50)
        one = fl.Federation(model, [(x, y)] * 10, "fedlesam-s", local, execution=ONE_THREAD)
        with fl.Federation(
            model, [(x, y)] * 10, "fedlesam-s", local, execution=fl.Execution(threads=1, workers=2)
        ) as two:
            timings = take_turns({"1 worker": one.round, "2 workers": two.round}, options.turns)
        note = f"2 workers are **{1 / timings[1].ratio:.2f}** times as fast."
        print(table(f"{spec}, fedlesam-s, 10 clients x 5 steps", timings, note), flush=True)


main()

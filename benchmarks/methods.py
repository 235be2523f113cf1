"""Every method's round relative to FedAvg's, on one thread.

python benchmarks/methods.py [--model cnn] [--turns 7]
"""

import argparse

import torch
from measure import machine, table, take_turns

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE, example
from fedlesam.models.catalogue import make_model

ONE_THREAD = fl.Execution(threads=1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="cnn")
    arguments.add_argument("--turns", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(500, 3, 32, 32, generator=draw), torch.randint(0, 10, (500,), generator=draw)
    model = make_model(options.model, (3, 32, 32), 10, 0)
    local = fl.LocalTraining(lr=0.01, epochs=1, batch_size=50)
    methods = {name: example(name) for name in CATALOGUE}
    made = {name: fl.Federation(model, [(x, y)] * 2, m, local, execution=ONE_THREAD) for name, m in methods.items()}
    rounds = {name: federation.round for name, federation in made.items()}
    print(machine())
    print(table(f"{options.model}, 10 steps per client, batch 50", take_turns(rounds, options.turns, warm_up=2)))


main()

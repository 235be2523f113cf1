"""The runs of a sweep one after another, and as one computation.

    python benchmarks/stacked_sweep.py [--runs 60] [--rounds 150] [--methods fedavg fedsam fedlesam-s]
    python benchmarks/stacked_sweep.py --shape features --runs 20 --rounds 5 --rows 40 --compiled-rows 16

Processor seconds per run, one thread. "training" has the rounds alone: no evaluation, no files. "whole" is a run from
its settings to its folder. Compiling is in neither, for PyTorch keeps programs between runs: two rounds warm up. In
training the ways, a process each, take turns of some rounds, so that a slower machine slows all of them; the quartiles
are of the turns' ratios.
"""

import argparse
import dataclasses
import multiprocessing
import shutil
import tempfile
import time
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles

import torch
from measure import machine

from fedlesam.core.computing import settled_objects
from fedlesam.data.dataset import DataSet, Images
from fedlesam.engines.stack import Stack
from fedlesam.federation import Federation
from fedlesam.runs.build import build, load_data
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.runner import execute
from fedlesam.runs.together import companies, train_together

SHAPES = {
    "digits": {"clients": 40, "active": 4},
    "features": {
        "model": "mlp:hidden=128",
        "split": "iid",
        "clients": 100,
        "active": 10,
        "batch_size": 20,
        "epochs": 5,
        "evaluate_every": 10,
    },
}
"""4 active clients of 36 samples, 20 steps each; 10 of 100 samples, 25 steps each."""


def features() -> DataSet:
    """Random ones: 256 numbers a sample."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(11_000, 1, 16, 16, generator=draw), torch.randint(0, 10, (11_000,), generator=draw)
    train, test = Images(x[:10_000], y[:10_000]), Images(x[10_000:], y[10_000:])
    return DataSet("features", train, test, tuple("0123456789"), (0.0,), (1.0,), scale=1.0, fingerprint="random")


def plans(base: RunConfig, count: int) -> list[RunConfig]:
    """Ten seeds, and as many values of rho (of the learning rate, where there is none) as are needed."""
    grid = []
    for i in range(count):
        value = 0.01 * (1 + i // 10)
        change = {"lr": 0.1 + value} if base.algorithm == "fedavg" else {"hyper": {"rho": value}}
        grid.append(resolve(dataclasses.replace(base, seed=i % 10, **change)))
    return grid


def serve(configs: list[RunConfig], connection: Connection) -> None:
    """Train runs in a process of their own: for each number that is sent so many rounds, for 0 whole runs.

    Args:
        configs: of the runs.
        connection: answers with processor seconds per run.
    """
    torch.set_num_threads(1)
    data = load_data(configs[0]) if configs[0].model != "mlp:hidden=128" else features()
    parts: list[tuple[Stack | None, list[Federation]]] = []
    for company in companies(configs):
        stack = Stack(rows, configs[0].compile) if (rows := configs[0].stack_runs) else None
        parts.append((stack, [build(configs[i], data, stack=stack).federation for i in company]))

    def rounds(count: int) -> None:
        def train(federation: Federation) -> None:
            for _ in range(count):
                federation.round(evaluate=False)

        for stack, federations in parts:
            runs = [partial(train, federation) for federation in federations]
            if stack is not None:
                stack.run(runs)
            else:
                for run in runs:
                    run()

    rounds(2)  # compiles
    with settled_objects:  # as a sweep does
        while (count := connection.recv()) is not None:
            began = time.process_time()
            rounds(count) if count else whole(configs, data)
            connection.send((time.process_time() - began) / len(configs))


def whole(configs: list[RunConfig], data: DataSet) -> None:
    """Runs from their settings to their folders."""
    folder = Path(tempfile.mkdtemp(prefix="fedlesam-bench-"))
    try:
        for company in companies(configs):
            runs = [partial(execute_one, configs[i], folder / str(i), data) for i in company]
            train_together(configs[company[0]], runs)
    finally:
        shutil.rmtree(folder)


def execute_one(config: RunConfig, folder: Path, data: DataSet, stack: Stack | None) -> None:
    execute(config, folder, data=data, stack=stack)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="digits")
    arguments.add_argument("--methods", nargs="+", default=["fedavg", "fedsam", "fedlesam-s"])
    arguments.add_argument("--runs", type=int, default=60)
    arguments.add_argument("--alone", type=int, default=2, help="runs of the engines that train them one by one")
    arguments.add_argument("--rounds", type=int, default=150)
    arguments.add_argument("--rows", type=int, default=240)
    arguments.add_argument("--compiled-rows", type=int, default=80)
    arguments.add_argument("--turns", type=int, default=10)
    arguments.add_argument("--ways", nargs="+", default=["plain", "stacked", "eager", "compiled"])
    arguments.add_argument("--only-training", action="store_true")
    options = arguments.parse_args()
    print(machine())
    print(f"\n{options.shape}, {options.runs} runs of {options.rounds} rounds; processor seconds per run\n")
    print("| method | way | training | whole | training, times | quartiles | whole, times |")
    print("|---" * 7 + "|")
    for method in options.methods:
        compare(method, options)


def compare(method: str, options: argparse.Namespace) -> None:
    context, served = multiprocessing.get_context("spawn"), {}
    for way in options.ways:
        rows = {"eager": options.rows, "compiled": options.compiled_rows}.get(way)
        base = RunConfig(algorithm=method, rounds=options.rounds, threads=1, **SHAPES[options.shape])
        engine = "plain" if way == "plain" else "stacked"
        base = dataclasses.replace(base, engine=engine, stack_runs=rows, compile=way == "compiled")
        served[way], there = context.Pipe()
        configs = plans(base, options.runs if rows else options.alone)
        context.Process(target=serve, args=(configs, there), daemon=True).start()

    def ask(count: int) -> list[float]:
        found = []
        for connection in served.values():
            connection.send(count)
            found.append(connection.recv())
        return found

    ends = [options.rounds * turn // options.turns for turn in range(options.turns + 1)]
    turns = [ask(after - before) for before, after in pairwise(ends)]
    wholes = [0.0] * len(served) if options.only_training else ask(0)
    for i, (way, connection) in enumerate(served.items()):
        low, _, high = quantiles([turn[0] / turn[i] for turn in turns])
        units, mine = (sum(turn[place] for turn in turns) for place in (0, i))
        times = f"{units / mine:.1f} | {low:.1f} to {high:.1f} | {wholes[0] / wholes[i] if wholes[i] else 0:.1f}"
        print(f"| {method} | {way} | {mine:.3f} | {wholes[i]:.3f} | {times} |", flush=True)
        connection.send(None)


if __name__ == "__main__":
    main()

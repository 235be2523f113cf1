"""The runs of a sweep one after another, and as one computation.

    python benchmarks/stacked_sweep.py [--runs 60] [--rounds 150] [--methods fedavg fedsam fedlesam-s]
    python benchmarks/stacked_sweep.py --shape features --runs 20 --rounds 5 --rows 40 --compiled-rows 16

Processor seconds per run, one thread. "training" has the rounds alone: no evaluation, no files. "whole" is a run from
its settings to its folder. Compiling is in neither, for PyTorch keeps programs between runs: two rounds warm up.
"""

import argparse
import dataclasses
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from measure import machine

from fedlesam.core.computing import settled_objects
from fedlesam.data.dataset import DataSet, Images
from fedlesam.engines.stack import Stack
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


def training(configs: list[RunConfig], data: DataSet, rounds: int) -> float:
    """Processor seconds of the rounds alone."""
    spent = 0.0
    for company in companies(configs):
        stack = Stack(rows, configs[0].compile) if (rows := configs[0].stack_runs) else None
        federations = [build(configs[i], data, stack=stack).federation for i in company]

        def run(federation, count):
            for _ in range(count):
                federation.round(evaluate=False)

        for count in (2, rounds):  # the first time to warm up
            began = time.process_time()
            if stack is None:
                for federation in federations:
                    run(federation, count)
            else:
                stack.run([partial(run, federation, count) for federation in federations])
        spent += time.process_time() - began
    return spent


def whole(configs: list[RunConfig], data: DataSet) -> float:
    """Processor seconds of the runs with their folders."""
    folder = Path(tempfile.mkdtemp(prefix="fedlesam-bench-"))
    began = time.process_time()
    try:
        for company in companies(configs):
            runs = [partial(execute_one, configs[i], folder / str(i), data) for i in company]
            train_together(configs[company[0]], runs)
        return time.process_time() - began
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
    arguments.add_argument("--compiled-rows", type=int, default=48)
    arguments.add_argument("--ways", nargs="+", default=["plain", "stacked", "eager", "compiled"])
    arguments.add_argument("--only-training", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"\n{options.shape}, {options.runs} runs of {options.rounds} rounds; processor seconds per run\n")
    print("| method | way | training | whole | training, times | whole, times |\n|---|---|---|---|---|---|", flush=True)
    for method in options.methods:
        units: list[float] = []
        for way in options.ways:
            rows = {"eager": options.rows, "compiled": options.compiled_rows}.get(way)
            base = RunConfig(algorithm=method, rounds=options.rounds, threads=1, **SHAPES[options.shape])
            engine = "plain" if way == "plain" else "stacked"
            base = dataclasses.replace(base, engine=engine, stack_runs=rows, compile=way == "compiled")
            configs = plans(base, options.runs if rows else options.alone)
            data = features() if options.shape == "features" else load_data(base)
            with settled_objects:  # as a sweep does
                found = [training(configs, data, options.rounds) / len(configs)]
                found.append(0.0 if options.only_training else whole(configs, data) / len(configs))
            units = units or found
            times = " | ".join(f"{unit / mine:.1f}" if mine else "-" for unit, mine in zip(units, found, strict=True))
            print(f"| {method} | {way} | {found[0]:.3f} | {found[1]:.3f} | {times} |", flush=True)


if __name__ == "__main__":
    main()

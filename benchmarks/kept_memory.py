"""A round with freed memory kept by the process, and with glibc's own way, which gives it back.

python benchmarks/kept_memory.py [--models cnn lenet resnet18] [--turns 3]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from measure import machine

import fedlesam as fl
from fedlesam.models.catalogue import make_model

LEFT_ALONE = {"GLIBC_TUNABLES": ""}
"""Who sets it, if to nothing, has chosen for themselves."""


def rounds(spec: str) -> dict[str, float]:
    """Seconds and page faults of a round of 10 steps, in this process."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(250, 3, 32, 32, generator=draw), torch.randint(0, 10, (250,), generator=draw)
    local = fl.LocalTraining(epochs=1, batch_size=50)
    fed = fl.Federation(
        make_model(spec, (3, 32, 32), 10, 0), [(x, y)] * 2, "fedavg", local, execution=fl.Execution(threads=1)
    )
    fed.round()
    count = 2 if spec == "resnet18" else 8
    faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    for _ in range(count):
        fed.round()
    took, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {"seconds": took / count, "faults": (used.ru_minflt - faults) / count, "peak": used.ru_maxrss / 1e3}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=["cnn", "lenet", "resnet18"])
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--here", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.here:
        print(json.dumps(rounds(options.here)))
        return
    print(machine())
    print("\n| model | memory is | s/round | page faults | peak, MB | ratio |\n|---|---|---|---|---|---|")
    for spec in options.models:
        found: dict[str, list[dict[str, float]]] = {"given back": [], "kept": []}
        for _ in range(options.turns):
            for name, extra in (("given back", LEFT_ALONE), ("kept", {})):
                command = [sys.executable, __file__, "--here", spec]
                done = subprocess.run(command, env=os.environ | extra, check=True, capture_output=True, text=True)
                found[name].append(json.loads(done.stdout))
        pairs = zip(found["kept"], found["given back"], strict=True)
        ratio = statistics.median(kept["seconds"] / back["seconds"] for kept, back in pairs)
        for name, runs in found.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            last = f"{ratio:.2f}" if name == "kept" else ""
            figures = f"{middle['seconds']:.3f} | {middle['faults']:,.0f} | {middle['peak']:.0f}"
            print(f"| {spec} | {name} | {figures} | {last} |", flush=True)


main()

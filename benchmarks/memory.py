"""Peak memory of a round in units of V, the bytes of the model's weights, over that of the process before the model.

    python benchmarks/memory.py [--weights 50000000] [--clients 4] [--turns 15] [fedavg scaffold ...]

Linear layers of a million weights, one batch a client. Every measurement is a process of its own; the peak is VmHWM
from /proc, reset before each round. The model that the user made counts; it is one V.

Then the time that a result takes beside a copy of its update in memory, in processor time of one core: adding it to the
sums (checks and norm included), and the mean, which is made in new memory, as the copy on the last line is.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from measure import machine
from torch import nn

import fedlesam as fl
from fedlesam.core.computing import keep_freed_memory
from fedlesam.core.messages import ClientResult, Memory
from fedlesam.core.reduction import Reduction
from fedlesam.core.slots import LocalResult

WIDTH = 1000


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", text)[1])  # type: ignore[index]


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, weights: int, clients: int) -> dict[str, float]:
    torch.set_num_threads(1)
    fl.Federation(nn.Linear(2, 2), [(torch.ones(2, 2), torch.tensor([0, 1]))], name).round()  # what is loaded once
    before = status("VmRSS")
    layers = max(1, weights // WIDTH**2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    vector = sum(p.nbytes for p in model.parameters())
    data = [(torch.randn(2, WIDTH), torch.tensor([0, 1])) for _ in range(clients)]
    local, how = fl.LocalTraining(epochs=1, batch_size=2), fl.Execution(threads=1)
    fed = fl.Federation(model, data, name, local, execution=how)
    found = {"constructed": (status("VmRSS") - before) / vector}
    for round in ("first", "second"):
        reset_peak()
        fed.round()
        found[round] = (status("VmHWM") - before) / vector
        found[f"after {round}"] = (status("VmRSS") - before) / vector
    return found


def seconds(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


def copies(weights: int, turns: int) -> dict[str, list[float]]:
    """Processor time in copies of an update, turn by turn; both places of the copy are written before."""
    torch.set_num_threads(1)
    keep_freed_memory()
    update, place = torch.randn(weights), torch.zeros(weights)
    found: dict[str, list[float]] = defaultdict(list)
    for by_examples in (False, True):
        sums = Reduction(0, (10 if by_examples else 1) * (turns + 1), by_examples)

        def add(sums: Reduction = sums) -> None:
            client, result = len(sums.summaries), LocalResult(update, 1, 0.1)
            sums.add(ClientResult(client, 10, result, 0.5, {}, {}, {}, Memory()))

        add()
        for _ in range(turns):
            one = seconds(lambda: place.copy_(update))
            found["adding it, by examples" if by_examples else "adding it"].append(seconds(add) / one)
            if not by_examples:
                found["the mean"].append(seconds(lambda sums=sums: sums.mean_update(torch.float32)) / one)
                found["a copy into new memory"].append(seconds(update.clone) / one)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("methods", nargs="*", default=["fedavg", "scaffold"])
    arguments.add_argument("--weights", type=int, default=50_000_000)
    arguments.add_argument("--clients", type=int, default=4)
    arguments.add_argument("--turns", type=int, default=15)
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.weights, options.clients)))
        return
    print(machine())
    print("| method | constructed | first round | after it | second round | after it |\n|---|---|---|---|---|---|")
    for name in options.methods:
        sizes = ["--weights", str(options.weights), "--clients", str(options.clients)]
        command = [sys.executable, __file__, "--one", name, *sizes]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {name} | {' | '.join(f'{value:.1f}' for value in found.values())} |", flush=True)
    print("\n| of one update | copies | quartiles |\n|---|---|---|")
    for what, ratios in copies(options.weights, options.turns).items():
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"| {what} | {statistics.median(ratios):.1f} | {low:.1f} to {high:.1f} |", flush=True)


main()

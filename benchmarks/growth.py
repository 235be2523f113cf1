"""Processor time and memory against the number of clients, at a fixed number of active ones.

    python benchmarks/growth.py [--rounds 20]
    python benchmarks/growth.py --resnet18 [--memory 2GB] [--workers 1]

A hundred thousand clients are a list; a million are a sequence that makes a client's data when it is drawn. The second
form trains every one of 200 ResNet-18 clients once with fedlesam-s and reports the peak of anonymous memory.
Each measurement is a process of its own; memory is RssAnon from /proc, summed over its workers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import machine

import fedlesam as fl
from fedlesam.models.catalogue import make_model
from fedlesam.runs.config import parse

ONE_THREAD = fl.Execution(threads=1)


def anonymous() -> int:
    """Bytes of this process and its children."""
    total = 0
    me = str(Path("/proc/self").resolve().name)
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if "RssAnon" in fields and me in (fields["Pid"].strip(), fields["PPid"].strip()):
            total += int(fields["RssAnon"].split()[0]) * 1024
    return total


class Drawn(Sequence[tuple[torch.Tensor, torch.Tensor]]):
    """Clients whose samples are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, client: Any) -> Any:
        draw = torch.Generator().manual_seed(client)
        return torch.randn(20, 1, 8, 8, generator=draw), torch.randint(0, 10, (20,), generator=draw)


class Peak(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, anonymous())
            time.sleep(0.05)


def small(clients: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 1, 8, 8, generator=draw), torch.randint(0, 10, (20,), generator=draw)
    model, local = make_model("mlp", (1, 8, 8), 10, 0), fl.LocalTraining(epochs=1, batch_size=10)
    data = Drawn(clients) if clients > 100_000 else [(x, y)] * clients
    began, before = time.process_time(), anonymous()
    fed = fl.Federation(model, data, "fedlesam-s", local, active=100, execution=ONE_THREAD)
    start = time.process_time() - began
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        fed.round()
        seconds.append(time.process_time() - began)
    return {
        "start": start,
        "round": statistics.median(seconds),
        "grown": anonymous() - before,
        "ever_active": len(fed.memories),
        "remembered": fed.memories.nbytes,
    }


def large(memory: int, workers: int) -> dict[str, float]:
    torch.set_num_threads(1)
    peak = Peak()
    peak.start()
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 32, 32, generator=draw), torch.randint(0, 10, (2,), generator=draw)
    model, local = make_model("resnet18", (3, 32, 32), 10, 0), fl.LocalTraining(epochs=1, batch_size=2)
    clients = [(x, y)] * 200
    with fl.Federation(
        model,
        clients,
        "fedlesam-s",
        local,
        active=20,
        execution=fl.Execution(threads=1, workers=workers, memory=memory),
    ) as fed:
        for start in range(0, 200, 20):
            fed.round(active=range(start, start + 20))
        remembered = len(fed.memories)
    return {"peak": peak.bytes, "ever_active": remembered}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--resnet18", action="store_true")
    arguments.add_argument("--memory", default="2GB")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        print(json.dumps(small(options.one, options.rounds)))
        return
    print(machine())
    if options.resnet18:
        found = large(int(parse("memory", options.memory, "--memory")), options.workers)
        print(
            f"resnet18, 200 clients, {found['ever_active']} ever active, fedlesam-s, --memory {options.memory}, "
            f"{options.workers} workers: peak of anonymous memory {found['peak'] / 1e9:.2f} GB"
        )
        return
    print("| clients | start, CPU s | round of 100, CPU s | memory grown, MB | ever active | remembered, MB |")
    print("|---|---|---|---|---|---|")
    for clients in (100, 1_000, 10_000, 100_000, 1_000_000):
        command = [sys.executable, __file__, "--one", str(clients), "--rounds", str(options.rounds)]
        r = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"| {clients:,} | {r['start']:.2f} | {r['round']:.3f} | {r['grown'] / 1e6:.0f} | {r['ever_active']:,} "
            f"| {r['remembered'] / 1e6:.1f} |",
            flush=True,
        )


main()

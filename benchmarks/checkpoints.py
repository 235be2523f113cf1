"""Checkpoints of very many clients, beside a plain write and fsync (or read) of the same bytes in one file.

    python benchmarks/checkpoints.py [--clients 10000] [--changed 100] [--saves 15] [--folder .]

The model is the mlp on digits, the method SCAFFOLD: every client keeps a vector. Memories are made, not trained.
Each save is measured in turn with its plain counterpart; the ratios are medians of wall-clock time, because a sync is
not processor time. `--budget` keeps memories in files instead of in RAM.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import machine

import fedlesam as fl
from fedlesam.core.messages import Memory
from fedlesam.models.catalogue import make_model
from fedlesam.runs.checkpoint import Checkpoints


def federation(clients: int, budget: int | None, folder: Path) -> fl.Federation:
    model = make_model("mlp", (1, 8, 8), 10, 0)
    data = (torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))
    how = fl.Execution(threads=1, memory=budget, folder=None if budget is None else folder)
    return fl.Federation(model, [data] * clients, "scaffold", active=1, execution=how)


def remember(fed: fl.Federation, clients: range) -> None:
    """A round in which these clients were active."""
    anchor, round = fed.state.weights, fed.state.round
    new: dict[int, Memory | None] = {}
    for client in clients:
        memory = Memory(correction={"c": torch.randn(len(anchor))})
        new[client] = fed.memories.prepare(round, client, memory, anchor)
    fed.memories.make_room(round, anchor, new)
    fed.memories.commit(round, anchor, new)
    fed.state = fed.state.__class__(**{**vars(fed.state), "round": round + 1})


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def plain_write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sizes(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def measured_save(checkpoints: Checkpoints, fed: fl.Federation, plain: Path) -> tuple[float, float, int]:
    """Seconds of a save, of a plain write of as many bytes, and the bytes."""
    before = sizes(checkpoints.folder)
    took = seconds(lambda: checkpoints.save(fed))
    new = sum(size for name, size in sizes(checkpoints.folder).items() if name not in before)
    content = os.urandom(new)
    path = plain / str(fed.state.round) / checkpoints.folder.name  # a new file, as ours is
    path.parent.mkdir(parents=True, exist_ok=True)
    return took, seconds(lambda: plain_write(path, content)), new


def row(what: str, ours: Sequence[float], plain: Sequence[float], nbytes: int) -> str:
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    times = " | ".join(f"{statistics.median(times):.3f}" for times in (ours, plain))
    return f"| {what} | {nbytes / 1e6:,.1f} | {times} | {ratio:.1f} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--clients", type=int, default=10_000)
    arguments.add_argument("--changed", type=int, default=100)
    arguments.add_argument("--saves", type=int, default=15)
    arguments.add_argument("--budget", type=int, default=None)
    arguments.add_argument("--folder", type=Path, default=None)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine(), flush=True)
    print("| what | MB | seconds | plain, s | ratio |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        place = Path(name)
        fed = federation(options.clients, options.budget, place / "memory")
        remember(fed, range(options.clients))
        plain = place / "plain"
        first = [measured_save(Checkpoints(place / str(turn)), fed, plain) for turn in range(5)]
        print(row("first save", [f[0] for f in first], [f[1] for f in first], first[0][2]), flush=True)
        checkpoints = Checkpoints(place / "0")
        checkpoints.load(fed)
        steps = []
        for turn in range(options.saves):
            start = turn * options.changed % options.clients
            remember(fed, range(start, start + options.changed))
            steps.append(measured_save(checkpoints, fed, plain))
        print(row(f"next save, {options.changed} changed", *zip(*[s[:2] for s in steps], strict=True), steps[-1][2]))
        content = os.urandom(checkpoints.chain[-1].nbytes)
        plain_write(plain / "all", content)
        loads, reads = [], []
        for turn in range(5):
            other = federation(options.clients, options.budget, place / f"memory{turn}")
            loads.append(seconds(lambda other=other: Checkpoints(place / "0").load(other)))
            reads.append(seconds((plain / "all").read_bytes))
        print(row("load", loads, reads, len(content)))


main()

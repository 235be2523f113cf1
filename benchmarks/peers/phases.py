"""Where a two-worker round of ours goes on the work of run.py with --model mlp, beside a round of the bare loop.

    python benchmarks/peers/phases.py [--method fedlesam-s] [--store pinned] [--rounds 80] [--bare]

Milliseconds a round of the leader, means over its fastest quarter of rounds: on the clock, and processor time of its
main thread and of the process, with other threads, such as those that send. Messages wait for the other worker.
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import run as peers
import torch
import work

WALL, THREAD = 0, 1
spent: dict[str, list[float]] = {}
calls: Counter[str] = Counter()


def timed(owner: Any, name: str, label: str) -> None:
    """Time a function from now on, in processes forked later too."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def measured(*arguments: Any, **named: Any) -> Any:
        wall, thread = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            sums = spent.setdefault(label, [0.0, 0.0])
            sums[WALL] += time.perf_counter() - wall
            sums[THREAD] += time.thread_time() - thread
            calls[label] += 1

    setattr(owner, name, measured)


marks: list[dict[str, tuple[float, ...]]] = []


def mark() -> None:
    """The end of a round."""
    whole = time.perf_counter(), time.thread_time(), time.process_time()
    marks.append({"round": whole, **{label: (*sums, calls[label]) for label, sums in spent.items()}})


def report(first: int) -> None:
    """Print the parts of a round."""
    rounds = sorted(pairwise(marks[first:]), key=lambda ends: ends[1]["round"][WALL] - ends[0]["round"][WALL])
    best, none = rounds[: max(1, len(rounds) // 4)], (0.0, 0.0, 0.0)
    for label in marks[-1]:
        wall, thread, third = (
            statistics.fmean(after[label][i] - before.get(label, none)[i] for before, after in best) for i in range(3)
        )
        rest = f"{third * 1e3:6.1f} of the process" if label == "round" else f"{third:6.1f} calls"
        print(f"{label:<28}{wall * 1e3:7.1f} on the clock {thread * 1e3:6.1f} computed {rest}")


def ours(method: str, store: Any, rounds: int) -> None:
    from fedlesam import Execution, Federation, LocalTraining, algorithms
    from fedlesam.core.reduction import Reduction
    from fedlesam.engines import serial, world
    from fedlesam.engines.store import Store

    parts = [
        (serial, "drain", "clients' steps"),
        (Reduction, "add_many", "checks and exact sums"),
        (Store, "get", "memories, read"),
        (Store, "prepare", "memories, written"),
        (Store, "commit", "memories, committed"),
        (world.World, "broadcast", "messages: broadcast"),
        (world.World, "gather", "messages: gather"),
        (world.World, "add_up", "messages: sum of vectors"),
    ]
    for owner, name, label in parts:
        timed(owner, name, label)
    local = LocalTraining(
        lr=work.LR, lr_decay=1.0, epochs=1, batch_size=work.batch_size(), weight_decay=work.WEIGHT_DECAY, clip=work.CLIP
    )
    algorithm = algorithms.get(method, **({} if method == "fedavg" else {"rho": work.RHO}))
    how = Execution(workers=work.WORKERS, threads=1, store=store)
    clients = list(zip(*work.data(), strict=True))
    with Federation(work.first_model(), clients, algorithm, local, active=work.ACTIVE, execution=how) as federation:
        for _ in federation.run(rounds):
            mark()


def bare() -> None:
    import run_bare

    timed(work, "step", "clients' steps")
    timed(run_bare, "look_back", "clients' steps")
    work.mark, work.finish = mark, lambda *_: None  # type: ignore[assignment]
    run_bare.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("fedavg", "fedsam", "fedlesam-s"), default="fedlesam-s")
    parser.add_argument("--store", choices=("shared", "pinned"), default="shared", help="where memories are (shared)")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--bare", action="store_true", help="the bare loop instead of ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork")
    with tempfile.TemporaryDirectory() as folder:
        peers.export(Path(folder), argparse.Namespace(images=80, rounds=options.rounds, model="mlp", data=None))
        job = work.Job(folder, f"{folder}/result", options.rounds, False, 1, options.method, "mlp")
        (Path(folder) / "job.json").write_text(json.dumps(vars(job)))
        os.environ["PEERS_JOB"] = f"{folder}/job.json"
        if options.bare:
            bare()
        else:
            ours(options.method, options.store, options.rounds)
    report(min(10, options.rounds // 2))


if __name__ == "__main__":
    main()

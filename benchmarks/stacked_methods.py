"""The stacked engine against that of an older tree of this package, for every method that both have.

    git worktree add ../old 654ea0a       # before the step was one compiled function
    python benchmarks/stacked_methods.py ../old [--clients 40] [--turns 9]

mlp 64-64-10, 10 steps of 10 samples, one thread: processor milliseconds per client and round. The old engine, ours
and ours compiled are processes that take turns, a round each; the figures are medians of the turns.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from jitted_round import ours

HERE = Path(__file__).resolve()


def serve(clients: int, compile: bool) -> None:
    """For each method that is asked for, then for each empty line: a round, and the seconds it took."""
    round = None
    for line in sys.stdin:
        if method := line.strip():
            round = ours(method, clients, compile)
            for _ in range(12):  # uncompiled steps are recorded after a hundred
                round()
        assert round is not None
        began = time.process_time()
        round()
        print(time.process_time() - began, flush=True)


def ask(process: "subprocess.Popen[str]", line: str) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def compare(old: Path, clients: int, turns: int, methods: list[str] | None) -> None:
    trees, command = [old.resolve(), *[HERE.parents[1]] * 2], "from fedlesam.algorithms import CATALOGUE as c"
    processes, known = [], []
    for tree, way in zip(trees, ("eager", "eager", "compiled"), strict=True):
        place = {"env": {**os.environ, "PYTHONPATH": str(tree)}, "text": True, "cwd": tree}
        names = [sys.executable, "-c", f"{command}; print(*c)"]
        known.append(subprocess.run(names, capture_output=True, check=True, **place).stdout.split())
        line = [sys.executable, str(HERE), str(old), "--clients", str(clients), "--serve", way]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(line, **pipes, **place))
    print("| method | old | now | compiled | now, times | compiled, times |\n|---|---|---|---|---|---|", flush=True)
    for method in methods or [name for name in known[0] if name in known[1]]:
        for process in processes:
            ask(process, method)
        spent = [[ask(process, "") for process in processes] for _ in range(turns)]
        each = [median(column) / clients * 1e3 for column in zip(*spent, strict=True)]
        times = [median(turn[0] / turn[i] for turn in spent) for i in (1, 2)]
        print("|", method, *(f"| {ms:.3f}" for ms in each), *(f"| {ratio:.2f}" for ratio in times), "|", flush=True)
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("old", type=Path, help="the older tree")
    arguments.add_argument("--clients", type=int, default=40)
    arguments.add_argument("--turns", type=int, default=9)
    arguments.add_argument("--methods", nargs="+", help="by default all that both trees have")
    arguments.add_argument("--serve", choices=["eager", "compiled"], help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve:
        serve(options.clients, options.serve == "compiled")
    else:
        compare(options.old, options.clients, options.turns, options.methods)


if __name__ == "__main__":
    main()

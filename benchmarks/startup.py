"""From process start to exit: `fedlesam --help`, and a run of one round on digits.

python benchmarks/startup.py [--turns 7]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import machine, table, take_turns


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--turns", type=int, default=7)
    options = arguments.parse_args()
    fedlesam = [sys.executable, "-m", "fedlesam"]
    with tempfile.TemporaryDirectory() as folder:
        count = iter(range(1_000_000))

        def call(*words: str) -> None:
            subprocess.run([*fedlesam, *words], check=True, capture_output=True)

        def run() -> None:
            call("run", "--rounds", "1", "--quiet", "--out", str(Path(folder) / str(next(count))))

        bare = [sys.executable, "-c", "import torch"]
        candidates = {
            "python -c 'import torch'": lambda: subprocess.run(bare, check=True),
            "fedlesam --help": lambda: call("--help"),
            "fedlesam run --help": lambda: call("run", "--help"),
            "fedlesam run --rounds 1": run,
        }
        print(machine())
        print(table("Start-up", take_turns(candidates, options.turns)))


main()

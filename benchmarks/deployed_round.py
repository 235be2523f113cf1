"""What a round of a Flower deployment on this machine costs beside its training, with Flower's own executor and ours.

    python benchmarks/deployed_round.py [--nodes 3] [--rounds 6]

The model is the small mlp of examples/flower-cifar on the embedded digits: training takes a tenth of a second. Rounds
are counted from the second on. Processor time is that of all processes of the deployment.
"""

import argparse
import re
import resource
import statistics
from pathlib import Path

from fedlesam.flower.app import read_app
from fedlesam.flower.trial import Trial

APP = Path(__file__).resolve().parents[1] / "examples" / "flower-cifar"
ROUND = re.compile(r"round \d+: .* (\d+\.\d+) s$")


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(nodes: int, rounds: int, forked: bool) -> tuple[list[float], float]:
    """Seconds of the rounds, and processor seconds of everything."""
    lines: list[str] = []
    before = processor_seconds()
    Trial(read_app(APP), lines.append, nodes=nodes, rounds=rounds, forked=forked).run()
    seconds = [float(found[1]) for line in lines if (found := ROUND.search(line))]
    return seconds[1:], processor_seconds() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    for forked, name in ((False, "Flower's executor"), (True, "fedlesam deploy executor")):
        short, little = measure(given.nodes, 2, forked)
        seconds, much = measure(given.nodes, given.rounds, forked)
        messages = given.nodes * (given.rounds - 2)
        low, high = min(short + seconds), max(short + seconds)
        print(
            f"{name}: {statistics.median(seconds):.1f} s a round ({low:.1f} to {high:.1f}), "
            f"{(much - little) / messages:.2f} s of processor time a message",
            flush=True,
        )


if __name__ == "__main__":
    main()

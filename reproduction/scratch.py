"""The claims of SCAFFOLD's family on a small network from scratch: what is run, fixed beforehand. Imports no PyTorch.

docs/results/scratch/protocol.md says why. Bench, lines, stages and tables are those of `claim-features`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from reproduction.heads import Bench, Lines

NAME = "claim-scratch"
SHOWS = "the claims of SCAFFOLD's family on a small network with GroupNorm, trained from scratch"


@dataclass(frozen=True)
class ScratchBench(Bench):
    """A network that sees the pictures themselves."""

    data: str = "fashion-mnist"
    network: str = "cnn:width=8"
    before: "ScratchBench | None" = None
    """Run only where the gate of that one failed."""

    @property
    def name(self) -> str:
        return f"{self.data}-{self.split}-{self.images // self.clients}-images"

    @property
    def model(self) -> str:
        return self.network

    @property
    def cell(self) -> str:
        return "CIFAR-10 with this split" if self.data == "fashion-mnist" else "this cell"

    def printed(self, left: str, right: str) -> float:
        """The gain in the paper's table 2; Fashion-MNIST has none there, CIFAR-10's is in its place."""
        paper = "cifar10" if self.data == "fashion-mnist" else self.data
        return Bench(split=self.split, data=paper).printed(left, right)


def is_due(bench: ScratchBench, path: Path) -> bool:
    """Whether it is to be run: always, or if the gate of the one before it failed.

    Args:
        bench: A problem.
        path: The file of lines.
    """
    if bench.before is None:
        return True
    gate, asked = Lines.read(bench.before, path).gate(), bench.before.gate
    return gate is not None and asked is not None and gate < asked


def benches(scale: str, seeds: int | None = None) -> list[ScratchBench]:
    """The problems, in the order of work. Full scale has the paper's number of rounds.

    200 rounds of 100 clients, 400 of CIFAR-100 with its 2 epochs: a run takes about two minutes of a core, with two
    passes four.
    """
    full = scale == "full"
    first = ScratchBench(
        rounds=800 if full else 200,
        rhos=(0.01, 0.03, 0.1, 0.3),
        seeds=seeds or 5,
        families=(("scaffold", ("fedlesam-s", "fedgamma")),),
        damped=(),
        others=("freesam-s",),
        at_papers=("fedlesam-s", "fedgamma"),
    )
    if scale == "smoke":
        small = replace(first, rounds=2, every=1, last=2, images=200, held_out=100, clients=10, active=2, epochs=1)
        few = replace(small, network="cnn:width=2", lrs=(0.1,), rhos=(0.1,), tuning_seeds=1, seeds=seeds or 2)
        return [replace(few, gate=-100.0)]
    pictures = replace(first, data="cifar10")
    many = replace(first, data="cifar100", split="pathological-10", epochs=2, rounds=800 if full else 400)
    return [
        some
        for bench in (first, pictures, many)
        for some in (bench, replace(bench, images=3_000, batch_size=10, before=bench))
    ]

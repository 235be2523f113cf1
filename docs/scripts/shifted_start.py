"""Check the zero-cost identity of docs/design.md: one loop from w + e against a loop that adds e at every step.

python docs/scripts/shifted_start.py
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedlesam as fl
from fedlesam.rules import Ascent, GlobalAscent, State, Step


@dataclass(frozen=True)
class AddedEveryStep(Ascent):
    """FedLESAM's e, computed once a round and added at every step, as the algorithm is printed."""

    gradient = "current"

    def begin(self, anchor: Tensor, client_state: State) -> State:
        e = GlobalAscent(self.rho).round_perturbation(anchor, client_state, {})
        return {"e": torch.zeros_like(anchor) if e is None else e}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return step.client_state["e"]

    def next_client_state(self, anchor: Tensor, client_state: State) -> State:
        return {"old": anchor}


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def federation(algorithm: fl.Algorithm, epochs: int = 3, clip_scope: Any = "loss") -> fl.Federation:
    rng = torch.Generator().manual_seed(0)
    data = [(torch.randn(40, 5, generator=rng), torch.randint(3, (40,), generator=rng)) for _ in range(4)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    local = fl.LocalTraining(epochs=epochs, batch_size=10, clip=0.5, clip_scope=clip_scope)
    return fl.Federation(model, data, algorithm, local, active=0.5)


def difference(algorithm: fl.Algorithm, clip_scope: str) -> float:
    """Of the weights after eight rounds with frequent clipping, relative to their distance from the start."""
    added = replace(algorithm, perturbation=AddedEveryStep(algorithm.perturbation.rho))
    one, other = federation(algorithm, clip_scope=clip_scope), federation(added, clip_scope=clip_scope)
    start = one.weights
    for _ in zip(one.run(8), other.run(8), strict=True):
        pass
    return float((one.weights - other.weights).norm() / (one.weights - start).norm())


def operations_of_an_epoch(algorithm: fl.Algorithm) -> Counter[str]:
    """The tensor operations of a round of four epochs less those of three: two clients, four steps each."""
    totals = []
    for epochs in (3, 4):
        trained = federation(algorithm, epochs)
        for _ in range(3):
            trained.round([0, 1])
        with CountOperations() as counted:
            trained.round([0, 1])
        totals.append(counted.counts)
    return totals[1] - totals[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for make in (fl.algorithms.fedlesam, fl.algorithms.fedlesam_s, fl.algorithms.fedlesam_d):
        for scope in ("loss", "corrected"):
            print(
                f"{make.__name__:12} clip_scope {scope:10} relative difference {difference(make(rho=0.1), scope):.0e}"
            )
    plain, shifted = (operations_of_an_epoch(make()) for make in (fl.algorithms.fedavg, fl.algorithms.fedlesam))
    same = plain == shifted
    print(f"operations of an epoch: fedavg {plain.total()}, fedlesam {shifted.total()}, the same ones: {same}")

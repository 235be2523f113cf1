"""Slot 3, how to land: from the mean update d to the next global model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.core.checks import param
from fedlesam.core.slots import RoundResult, ServerRule, State


@dataclass(frozen=True)
class Adam(ServerRule):
    """FedAdam, without bias correction. Reddi et al., Adaptive Federated Optimization, ICLR 2021."""

    lr_g: float = param(0.1, above=0)
    b1: float = param(0.9, at_least=0, below=1)
    b2: float = param(0.99, at_least=0, below=1)
    eps: float = param(0.01, above=0)

    def initial(self, anchor: Tensor) -> State:
        return {"a": torch.zeros_like(anchor), "b": torch.zeros_like(anchor)}

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        d = result.update
        a = self.b1 * state["a"] + (1 - self.b1) * d
        b = self.b2 * state["b"] + (1 - self.b2) * d * d
        return result.anchor + self.lr_g * a / (b.sqrt() + self.eps), {"a": a, "b": b}


@dataclass(frozen=True)
class Dynamic(ServerRule):
    """FedDyn's landing: w + d + H, with H += (K/N) * d, which keeps H the mean over all clients of their h_i."""

    lr_g: float = 1.0
    requires_uniform_weights = True

    def __post_init__(self) -> None:
        if self.lr_g != 1:
            raise ValueError(
                f"Dynamic: the dynamic server has no global learning rate, lr_g must be 1, got {self.lr_g}"
            )

    def initial(self, anchor: Tensor) -> State:
        return {"H": torch.zeros_like(anchor)}

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        total = torch.add(state["H"], result.update, alpha=result.share)
        return result.anchor + result.update + total, {"H": total}

    def remove_client(self, server_state: State, uploads: State, share: float) -> State:
        return {"H": torch.sub(server_state["H"], uploads["update"], alpha=share)}

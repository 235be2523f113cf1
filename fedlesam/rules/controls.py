"""Rules to compare with: what released code computes where it is not the paper's, and directions that know nothing."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlesam.core.checks import param
from fedlesam.core.slots import RoundResult, State, Step, TensorSpec
from fedlesam.core.vectors import ascent_, is_number
from fedlesam.rules.perturbation import Ascent, CorrectedAscent
from fedlesam.rules.server import Nesterov


@dataclass(frozen=True)
class ReleasedAscent(Ascent):
    """The perturbation of the authors' released code, which is not the paper's (errata 7 and 8).

    It indexes G, the flat last server step, by the *number of a tensor*: every entry of tensor j is shifted by
    -rho * G[j] / (sum over tensors k of abs(G[k]) + 1e-7). All clients have it from the server, from round 1 on.
    """

    formula = ("G = w - w_old", "e = -rho G[j] / (sum of abs(G[k]) + 1e-7) on every entry of tensor j")
    sizes: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Entries per tensor of the model; set by `for_model`."""

    def for_model(self, tensors: Sequence[TensorSpec]) -> "ReleasedAscent":
        return dataclasses.replace(self, sizes=tuple(shape.numel() for _, shape in tensors))

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor | None:
        if "old" not in server_state:
            return None
        step = (anchor - server_state["old"])[: len(self.sizes)]
        shifts = step * (-self.rho / (step.abs().sum() + 1e-7))
        counts, total = torch.tensor(self.sizes, device=anchor.device), sum(self.sizes)
        owner = torch.arange(len(self.sizes), device=anchor.device).repeat_interleave(counts, output_size=total)
        return shifts.index_select(0, owner)

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return {"old": result.anchor}


@dataclass(frozen=True)
class RandomRoundAscent(Ascent):
    """A placebo: a random direction of norm rho, fixed for a client's round. Theorem 1 cannot tell FedLESAM from it."""

    formula = ("e = rho u(r), r random, once a round",)
    draws = True

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor | None:
        return ascent_(torch.randn_like(anchor), self.rho) if not is_number(self.rho, 0) else None


@dataclass(frozen=True)
class RandomStepAscent(Ascent):
    """A placebo: a random direction of norm rho, fresh at every step."""

    formula = ("e = rho u(r), r random, at every step",)
    gradient = "none"
    draws = True

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        assert step.noise is not None
        return ascent_(step.noise, self.rho)


@dataclass(frozen=True)
class ShuffledAscent(Ascent):
    """A placebo: e = rho * (w_a - w_b) / norm(w_a - w_b) with two earlier global models, a before b before now.

    Each client draws one pair in every round, uniformly from the models of the last `pool` rounds, which the server
    sends: a difference such as FedLESAM's, with the same spectrum, but of another client and another time. Before the
    first round the pool holds the initial model `pool` times; of two equal models e = 0.
    """

    formula = ("e = rho (w_a - w_b) / norm(w_a - w_b), a and b drawn from the last rounds",)
    draws = True
    pool: int = param(10, at_least=2, whole=True)
    """The earlier global models from which two are drawn."""

    def initial(self, anchor: Tensor) -> State:
        return {f"old{k}": anchor for k in range(self.pool)}

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor | None:
        pair = torch.randperm(self.pool, device=anchor.device)[:2].sort().values
        models = torch.stack([server_state[f"old{k}"] for k in range(self.pool)])
        later, earlier = models.index_select(0, pair).unbind()
        back: Tensor = earlier - later
        norm = back.norm()
        return back.mul_(torch.where(norm > 0, self.rho / norm, 0.0))

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return {"old0": result.anchor} | {f"old{k}": server_state[f"old{k - 1}"] for k in range(1, self.pool)}


@dataclass(frozen=True)
class ReleasedCorrectedAscent(CorrectedAscent):
    """FedSMOO as FL-Simulator computed it until 502bec6 (2024-10-26): every tensor's mu_i and s are read from offset 0.

    Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023. A tensor of n entries
    takes entries 0 to n - 1 of the flat vectors, at the start of a round; the flat mu_i of its end is kept and sent.
    """

    formula = (
        "e = rho u(g0 - mu_i - s), every tensor of mu_i and s read from offset 0",
        "mu_i <- mu_i + e - s",
        "server: s <- rho u(mean(mu_i))",
    )
    requires_order = True
    sizes: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Entries per tensor of the model; set by `for_model`."""

    def for_model(self, tensors: Sequence[TensorSpec]) -> "ReleasedCorrectedAscent":
        return dataclasses.replace(self, sizes=tuple(shape.numel() for _, shape in tensors))

    def begin(self, anchor: Tensor, client_state: State) -> State:
        mu = super().begin(anchor, client_state)["mu"]
        return {"mu": self._misread(mu, torch.empty_like(mu)), "s": torch.empty_like(mu)}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        s = self._misread(step.server_state["s"], step.client_state["s"])
        return super().ascend(gradient, step._replace(server_state={"s": s}))

    def _misread(self, vector: Tensor, into: Tensor) -> Tensor:
        """The vector whose every tensor has the first entries of `vector`."""
        for piece in torch.split(into, list(self.sizes)):
            piece.copy_(vector[: len(piece)])
        return into


@dataclass(frozen=True)
class ReleasedNesterov(Nesterov):
    """FedNSAM's server as main_FedNSAM.py computes it, which loses the momentum: m = d, later (1 + gamma) * d.

    Liu et al., FedNSAM, arXiv 2602.23827.
    """

    formula = ("start: w + gamma m", "m <- (1 + gamma) d", "w <- w + m")

    def initial(self, anchor: Tensor) -> State:
        return {}

    def start(self, state: State, weights: Tensor) -> Tensor:
        return super().start(state, weights) if state else weights

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        m = (1 + self.gamma) * result.update if state else result.update
        return result.anchor + m, {"m": m}

"""The family beyond the paper's twelve once more: one class for each method, which says how it differs from FedAvg.

Like `oracle`, slow and direct on purpose, in double precision, and written from the mathematics alone; nothing is
imported from the package. Some classes can make a mistake on purpose (`wrong`), to show that a comparison would see it.
"""

import math
from collections import deque

import torch
from family_loop import Answer, FedAvg, Step, World, mean, unit
from torch import Tensor
from torch.nn.functional import log_softmax

__all__ = ["METHODS", "World"]


def divergence(teacher: Tensor, student: Tensor, tau: float) -> Tensor:
    """KL(softmax(teacher / tau), softmax(student / tau)): sum over classes of p_t log(p_t / p_v), batch mean."""
    p_t, log_p_t, log_p_v = (teacher / tau).softmax(1), log_softmax(teacher / tau, 1), log_softmax(student / tau, 1)
    return (p_t * (log_p_t - log_p_v)).sum(1).mean()


# where to look


class Sam(FedAvg):
    """FedSAM, the base of most."""

    def ascent(self, step: Step) -> Tensor:
        return self.p.rho * unit(self.gradient(step, step.v))


class FedASAM(FedAvg):
    def ascent(self, step: Step) -> Tensor:
        g0 = self.gradient(step, step.v)
        scale = {}
        for name, piece in self.pieces(step.v).items():
            scaled = "weight" in name or self.wrong == "T on every tensor"
            scale[name] = piece.abs() + self.p.eta if scaled else torch.ones_like(piece)
        T = self.joined(scale)
        return self.p.rho * T**2 * g0 / ((T * g0).norm() + 1e-7)


class MomentumSam(FedAvg):
    """Ascent along the momentum of the loss gradients of this round's earlier steps."""

    def open(self, i: int, start: Tensor) -> None:
        self.m = self.zero

    def descent(self, step: Step) -> Tensor:
        g = self.gradient(step, step.v + self.p.rho * unit(self.m), keep=True)
        self.m = self.p.beta * self.m + g
        return g


class FedSOL(FedAvg):
    """Ascent of the distance to the anchor's outputs, by how far each weight has moved."""

    def ascent(self, step: Step) -> Tensor:
        if step.number == 0:
            return self.zero
        with torch.no_grad():
            z_w = self.logits(step, self.w)
        q = self.gradient(step, step.v, of=lambda step, z_v: divergence(z_w, z_v, 3.0))
        return self.p.rho * self.scale(step) * unit(q)

    def scale(self, step: Step) -> Tensor:
        if not self.p.adaptive:
            return torch.ones_like(self.w)
        moved = {name: piece.abs() for name, piece in self.pieces(step.v - self.w).items()}
        if self.wrong == "the norm of the whole tensor":
            return self.joined({name: piece / max(float(piece.norm()), 1e-12) for name, piece in moved.items()})
        return self.joined({name: a / (a**2).sum(0, keepdim=True).sqrt().clamp(min=1e-12) for name, a in moved.items()})


class FedGF(Sam):
    """Between the clients' ascent and the global one, by how far the clients move."""

    def set_up(self) -> None:
        self.indicators: deque[float] = deque(maxlen=self.p.window)
        self.c = 0.0

    def ascent(self, step: Step) -> Tensor:
        above = self.w - self.p.rho_g * unit(self.d)
        return self.c * (above - step.v) + (1 - self.c) * super().ascent(step)

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        super().land(answers, asked)
        length = self.mean_of([answer.d.norm() for answer in answers.values()])
        self.indicators.append(float(length > self.p.threshold))
        so_far = self.p.window if self.wrong == "c over the whole window" else len(self.indicators)
        self.c = sum(self.indicators) / so_far


# the dynamic regulariser and what comes of it


class FedDyn(FedAvg):
    def set_up(self) -> None:
        self.h: dict[int, Tensor] = {}
        self.H = self.zero

    def correction(self, i: int, start: Tensor) -> tuple[float, float, Tensor]:
        return 1.0, self.p.lam, self.p.lam * (self.h.get(i, self.zero) - start)

    def close(self, i: int, answer: Answer) -> None:
        self.h[i] = self.h.get(i, self.zero) + answer.d

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        """H is the mean of h_i over all N."""
        self.H = sum(self.h.values()) / self.N
        self.w = self.w + self.d + self.H


class FedSpeedReleased(Sam, FedDyn):
    """FedDyn with SAM."""


class FedSpeed(FedDyn):
    def descent(self, step: Step) -> Tensor:
        g0 = self.gradient(step, step.v)
        g = self.gradient(step, step.v + self.p.rho * unit(g0), keep=True)
        if self.wrong == "clipped before mixing":
            g0, g = self.clip(g0), self.clip(g)
        return (1 - self.p.alpha) * g0 + self.p.alpha * g

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        self.w = self.w + self.d + self.mean_of([self.h[i] for i in answers])


class FedGLOSS(FedDyn):
    """Starts where the last update is taken back a little."""

    def ramp(self, rho: float) -> float:
        """A rho of 0 stays 0: it is switched off."""
        if not self.p.warmup or not rho:
            return rho
        return 0.001 + (rho - 0.001) * min(1.0, self.t / self.p.warmup)

    def start(self) -> Tensor:
        return self.w - self.ramp(self.p.rho_s) * unit(self.d)

    def ascent(self, step: Step) -> Tensor:
        return self.ramp(self.p.rho) * unit(self.gradient(step, step.v))


class FedGMT(FedDyn):
    """A moving average of the global models teaches."""

    def set_up(self) -> None:
        super().set_up()
        self.a = self.w

    def objective(self, step: Step, logits: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.logits(step, self.w if self.wrong == "the anchor teaches" else self.a)
        factor = 1.0 if self.wrong == "without tau^2" else self.p.tau**2
        return super().objective(step, logits) + self.p.strength * factor * divergence(teacher, logits, self.p.tau)

    def correction(self, i: int, start: Tensor) -> tuple[float, float, Tensor]:
        if self.wrong == "with the pull":
            return super().correction(i, start)
        return 1.0, 0.0, self.p.lam * self.h.get(i, self.zero)

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        before = self.w
        super().land(answers, asked)
        new = before if self.wrong == "the old w is averaged" else self.w
        self.a = self.p.beta * self.a + (1 - self.p.beta) * new


class FedSMOOReleased(FedDyn):
    """FedSMOO whose vectors are cut wrongly: every tensor takes them from their first entry."""

    def set_up(self) -> None:
        super().set_up()
        self.mu: dict[int, Tensor] = {}
        self.s = self.zero

    def cut(self, flat: Tensor) -> Tensor:
        if self.wrong == "cut rightly":
            return flat
        return torch.cat([flat[: shape.numel()] for shape in self.shapes])

    def open(self, i: int, start: Tensor) -> None:
        self.mine, self.s_cut = self.cut(self.mu.get(i, self.zero)), self.cut(self.s)

    def ascent(self, step: Step) -> Tensor:
        e: Tensor = self.p.rho * unit(self.gradient(step, step.v) - self.mine - self.s_cut)
        self.mine = self.mine + e - self.s_cut
        return e

    def close(self, i: int, answer: Answer) -> None:
        super().close(i, answer)
        self.mu[i] = self.mine

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        super().land(answers, asked)
        self.s = self.p.rho * unit(mean([self.mu[i] for i in answers]))


# momentum at the server


class FedNSAM(Sam):
    """Nesterov: starts where the momentum will lead."""

    def set_up(self) -> None:
        self.m = self.zero

    def start(self) -> Tensor:
        return self.w + self.p.gamma * self.m

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        self.m = self.p.gamma * self.m + self.d
        self.w = self.w + self.m


class FedNSAMReleased(FedNSAM):
    """The momentum is lost."""

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        first = not self.m.any()
        self.m = self.d if first else (1 + self.p.gamma) * self.d
        self.w = self.w + self.m


class FedAvgM(FedAvg):
    def set_up(self) -> None:
        self.m = self.zero

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        self.m = 0.9 * self.m + self.d
        self.w = self.w + self.p.lr_g * self.m


class FedYogi(FedAvg):
    def set_up(self) -> None:
        self.a = self.b = self.zero

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        d = self.d
        self.a = 0.9 * self.a + 0.1 * d
        self.b = self.b - 0.01 * d**2 * torch.sign(self.b - d**2)
        self.w = self.w + self.p.lr_g * self.a / (self.b.sqrt() + 0.01)


class FedAdagrad(FedAvg):
    def set_up(self) -> None:
        self.b = self.zero

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        self.b = self.b + self.d**2
        self.w = self.w + self.p.lr_g * self.d / (self.b.sqrt() + 0.01)


# a learning rate inside the round


class FedSWA(FedAvg):
    def rate(self, lr: float, k: int, steps: int) -> float:
        return lr * ((1 - k / steps) + self.p.floor * k / steps)


class FedMoSWA(FedSWA):
    def set_up(self) -> None:
        self.m = self.zero
        self.c: dict[int, Tensor] = {}

    def correction(self, i: int, start: Tensor) -> tuple[float, float, Tensor]:
        return 1.0, 0.0, self.m - self.c.get(i, self.zero)

    def close(self, i: int, answer: Answer) -> None:
        total = sum(answer.rates)
        if self.wrong == "lr for the mean lr_k":
            total = answer.steps * answer.rates[0]
        self.c[i] = self.c.get(i, self.zero) - self.m - answer.d / total

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        super().land(answers, asked)
        self.m = self.m + self.p.gamma * self.mean_of([self.c[i] - self.m for i in answers])


# more


class FedWMSAM(FedAvg):
    """Momentum and control variates, weighted by a number that the clients' angles move."""

    def set_up(self) -> None:
        self.m = self.c = self.zero
        self.c_i: dict[int, Tensor] = {}
        self.alpha = float(self.p.alpha)

    def turn(self, i: int) -> Tensor:
        return self.c - self.c_i.get(i, self.zero)

    def ascent(self, step: Step) -> Tensor:
        ahead = self.m + self.alpha / (1 - self.alpha) * self.turn(step.client)
        return self.p.rho * unit(self.w + step.number * ahead - step.v)

    def correction(self, i: int, start: Tensor) -> tuple[float, float, Tensor]:
        return self.alpha, 0.0, (1 - self.alpha) * self.m + self.alpha * self.turn(i)

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        super().land(answers, asked)
        lr = self.world.lr * self.world.lr_decay**self.t
        fresh = {
            i: self.c_i.get(i, self.zero) - self.c - answer.d / (answer.steps * lr) for i, answer in answers.items()
        }
        changes = [fresh[i] - self.c_i.get(i, self.zero) for i in answers]
        m = -self.d / (sum(answer.steps for answer in answers.values()) / len(answers) * lr)
        seen = m if self.wrong == "the next m" else self.m
        q = self.mean_of([self.alike(answer.d, seen) for answer in answers.values()])
        self.alpha = 0.99 * self.alpha + 0.01 * min(max(float(q), 0.1), 0.9)
        self.c = self.c + sum(changes) / self.N
        self.c_i.update(fresh)
        self.m = m

    def alike(self, d: Tensor, m: Tensor) -> Tensor:
        """q_i = 1 + cos(d_i, m); 0 while m is 0."""
        return 1 + d @ m / (d.norm() * m.norm()) if m.any() else torch.zeros(())


class DPFedSAM(Sam):
    """Each update has at most norm C; `draw(t)` is a standard normal vector of the round, for the noise."""

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        C = self.p.clip
        kept = [answer.d * min(1.0, C / max(float(answer.d.norm()), 1e-300)) for answer in answers.values()]
        self.d = sum(kept, self.zero) / asked
        if self.p.noise:
            K = self.N if self.wrong == "N for K" else asked
            self.d = self.d + self.p.noise * C / K * self.p.draw(self.t)
        assert math.isfinite(float(self.d.norm()))
        super().land(answers, asked)


METHODS: dict[str, type[FedAvg]] = {
    "fedspeed": FedSpeed,
    "fedspeed-released": FedSpeedReleased,
    "fedasam": FedASAM,
    "fedgf": FedGF,
    "fedgloss": FedGLOSS,
    "fednsam": FedNSAM,
    "fednsam-released": FedNSAMReleased,
    "fedsmoo-released": FedSMOOReleased,
    "fedswa": FedSWA,
    "fedmoswa": FedMoSWA,
    "fedgmt": FedGMT,
    "fedsol": FedSOL,
    "fedwmsam": FedWMSAM,
    "dp-fedsam": DPFedSAM,
    "msam": MomentumSam,
    "fedavgm": FedAvgM,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
}
"""All methods of the catalogue beyond those of `oracle`."""

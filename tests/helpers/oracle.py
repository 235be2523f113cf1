"""Every method of the catalogue once more: plain imperative code, written from the mathematics alone.

Slow and direct on purpose: weights are dicts of tensors, FedLESAM is v + e at every step with weight decay on v, every
correction is written out at every step. Nothing here uses the package's rules, client or server. Only the order of the
batches and the seeds of random directions are taken from it, because those are inputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedlesam.core.batches import batch_indices
from fedlesam.core.seeds import derive, generator

Weights = dict[str, Tensor]

LOCAL_ASCENT = ("fedsam", "mofedsam", "fedgamma")
GLOBAL_ASCENT = ("fedlesam", "fedlesam-s", "fedlesam-d", "fedlesam-m")
PREVIOUS_STEP = ("freesam", "freesam-s", "freesam-d")
RELEASED = ("fedlesam-released", "fedlesam-released-s", "fedlesam-released-d")
CONTROL_VARIATES = (
    "scaffold",
    "fedgamma",
    "fedlesam-s",
    "freesam-s",
    "fedlesam-released-s",
    "shuffled-s",
    "scaffold-damped",
)
MOMENTUM = ("fedcm", "mofedsam", "fedlesam-m")
DYNAMIC = ("feddyn", "fedsmoo", "fedlesam-d", "freesam-d", "fedlesam-released-d")


def norm(v: Weights) -> float:
    return sum(float((t**2).sum()) for t in v.values()) ** 0.5


def flat(v: Weights) -> Tensor:
    return torch.cat([t.reshape(-1) for t in v.values()])


def size(v: Weights) -> int:
    return sum(t.numel() for t in v.values())


def normals(seed: int, count: int) -> Tensor:
    """Standard normal numbers: two from the 64 bits of the mixed seed xor a place, in unbounded integers."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 27) * 0x3C79AC492BA7B653 % 2**64
        x = (x ^ x >> 33) * 0x1C69B3F74AC4AE35 % 2**64
        return x ^ x >> 27

    bits = [mixed(mixed(seed) ^ place) for place in range((count + 1) // 2)]
    polar = [(math.sqrt(-2 * math.log((b // 2**40 + 0.5) / 2**24)), math.tau * (b % 2**24) / 2**24) for b in bits]
    pairs = [(radius * math.cos(angle), radius * math.sin(angle)) for radius, angle in polar]
    return torch.tensor([first for first, _ in pairs] + [second for _, second in pairs], dtype=torch.float64)[:count]


Slope = Callable[[Weights, Any, Any], Weights]
"""The gradient of a batch's loss, of weights, x and y."""


def gradient(p: Weights, x: Tensor, y: Tensor) -> Weights:
    """Of the mean cross-entropy of a tanh network."""
    leaves = {k: t.detach().requires_grad_() for k, t in p.items()}
    names = list(leaves)
    for k in range(0, len(names), 2):
        x = x @ leaves[names[k]].T + leaves[names[k + 1]]
        if k + 2 < len(names):
            x = torch.tanh(x)
    scores = x - x.logsumexp(1, keepdim=True)
    loss = -scores[torch.arange(len(y)), y].mean()
    return dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))


class Oracle:
    def __init__(
        self,
        method: str,
        model: nn.Module,
        clients: Sequence[tuple[Tensor, Tensor]],
        epochs: Callable[[int, int], int],
        *,
        seed: int,
        lr: float,
        lr_decay: float,
        batch_size: int,
        weight_decay: float,
        clip: float,
        clip_scope: str,
        momentum: float = 0.0,
        rho: float = 0.0,
        alpha: float = 1.0,
        lam: float = 0.0,
        prox: float = 0.0,
        lr_g: float = 1.0,
        first: str = "none",
        by_examples: bool = False,
        reference: str = "received",
        direction: str = "back",
        draws: torch.dtype = torch.float64,
        slope: Slope | None = None,
    ) -> None:
        self.method, self.clients, self.epochs, self.seed, self.slope = method, clients, epochs, seed, slope or gradient
        self.lr, self.lr_decay, self.batch_size, self.weight_decay = lr, lr_decay, batch_size, weight_decay
        self.clip_norm, self.clip_scope, self.heavy_ball = clip, clip_scope, momentum
        self.rho, self.alpha, self.lam, self.prox, self.lr_g = rho, alpha, lam, prox, lr_g
        self.first, self.by_examples, self.draws = first, by_examples, draws
        self.reference, self.sign = reference, {"back": 1.0, "ahead": -1.0}[direction]

        self.t = 0
        self.w: Weights = {k: p.detach().clone() for k, p in model.named_parameters()}
        self.last_w: Weights | None = None
        """The global model of one round before."""
        self.c, self.m, self.H, self.s = self.zeros(), self.zeros(), self.zeros(), self.zeros()
        self.a, self.b = self.zeros(), self.zeros()
        self.past = [self.w] * 10
        """The global models of the last rounds, the newest first."""
        self.c_i: dict[int, Weights] = {}
        self.h_i: dict[int, Weights] = {}
        self.mu_i: dict[int, Weights] = {}
        self.old_i: dict[int, Weights] = {}
        self.clipped, self.steps = 0, 0
        self.trace: list[tuple[int, int, Tensor, Tensor]] = []
        """(round, client, v, e) before every step."""

    def zeros(self) -> Weights:
        return {k: torch.zeros_like(t) for k, t in self.w.items()}

    def clip(self, g: Weights) -> Weights:
        factor = self.clip_norm / (norm(g) + 1e-6)
        self.steps += 1
        if factor >= 1:
            return g
        self.clipped += 1
        return {k: t * factor for k, t in g.items()}

    def random(self, seed: int) -> Weights:
        """A random direction; the precision of the model it is for decides what is drawn."""
        draw = torch.Generator().manual_seed(seed)
        return self.scaled(torch.randn(size(self.w), generator=draw, dtype=self.draws).double())

    def scaled(self, q: Tensor) -> Weights:
        q = self.rho * q / (q.norm() + 1e-7)
        return {k: piece.reshape(t.shape) for (k, t), piece in zip(self.w.items(), self.cut(q), strict=True)}

    def cut(self, q: Tensor) -> list[Tensor]:
        return list(q.split([t.numel() for t in self.w.values()]))

    def train(self, i: int) -> tuple[Weights, int]:
        """Client i's local training: its v at the end and its number of steps."""
        w, lr = self.w, self.lr * self.lr_decay**self.t
        c_i, h_i = self.c_i.get(i, self.zeros()), self.h_i.get(i, self.zeros())
        mu = self.mu_i.get(i, self.zeros())
        x, y = self.clients[i]
        draw = generator(self.seed, "batches", self.t, i)
        v = {k: t.clone() for k, t in w.items()}
        heavy, before, taken = self.zeros(), None, 0
        for batch in batch_indices(len(x), self.batch_size, self.epochs(self.t, i), False, draw):
            xb, yb = x[batch], y[batch]

            e = self.zeros()
            if self.method in LOCAL_ASCENT:
                g0 = self.slope(v, xb, yb)
                length = norm(g0) + 1e-7
                e = {k: self.rho * g0[k] / length for k in v}
            if self.method == "fedsmoo":
                g0 = self.slope(v, xb, yb)
                q = {k: g0[k] - mu[k] - self.s[k] for k in v}
                length = norm(q) + 1e-7
                e = {k: self.rho * q[k] / length for k in v}
                mu = {k: mu[k] + e[k] - self.s[k] for k in v}
            old = self.old_i.get(i) if self.reference == "received" else self.last_w
            if self.method in GLOBAL_ASCENT and (old is not None or self.first == "origin"):
                back = {k: (self.zeros() if old is None else old)[k] - w[k] for k in v}
                length = norm(back)
                if length > 0:
                    e = {k: self.sign * self.rho * back[k] / length for k in v}
            if self.method in RELEASED and self.last_w is not None:
                server_step = torch.cat([(w[k] - self.last_w[k]).reshape(-1) for k in w])
                picked = [float(server_step[j]) for j in range(len(w))]
                total = sum(abs(entry) for entry in picked) + 1e-7
                e = {k: torch.full_like(v[k], -self.rho * picked[j] / total) for j, k in enumerate(v)}
            if self.method == "random-round":
                e = self.random(derive(self.seed, "step", self.t, i))
            if self.method == "random-step":
                e = self.scaled(normals(derive(self.seed, "step", self.t, i) + 1 + taken, size(self.w)))
            if self.method == "shuffled-s":
                draw_pair = torch.Generator().manual_seed(derive(self.seed, "step", self.t, i))
                later, earlier = sorted(torch.randperm(10, generator=draw_pair).tolist()[:2])
                back = {k: self.past[earlier][k] - self.past[later][k] for k in v}
                length = norm(back)
                if length > 0:
                    e = {k: self.rho * back[k] / length for k in v}
            if self.method in PREVIOUS_STEP and before is not None:
                length = norm(before) + 1e-7
                e = {k: self.rho * before[k] / length for k in v}
            self.trace.append((self.t, i, flat(v), flat(e)))

            g = self.slope({k: v[k] + e[k] for k in v}, xb, yb)
            before = g
            if self.clip_scope == "loss":
                g = self.clip(g)
            if self.method in ("fedlesam-released-s", "scaffold-damped"):
                g = {k: g[k] + 0.1 * (self.c[k] - c_i[k]) for k in v}
            elif self.method in CONTROL_VARIATES:
                g = {k: g[k] - c_i[k] + self.c[k] for k in v}
            if self.method in MOMENTUM:
                g = {k: self.alpha * g[k] + (1 - self.alpha) * self.m[k] for k in v}
            if self.method in DYNAMIC:
                g = {k: g[k] + self.lam * (h_i[k] - w[k]) for k in v}
            if self.method == "fedprox":
                g = {k: g[k] - self.prox * w[k] for k in v}
            if self.clip_scope == "corrected":
                g = self.clip(g)
            if self.method in DYNAMIC:
                g = {k: g[k] + self.lam * v[k] for k in v}
            if self.method == "fedprox":
                g = {k: g[k] + self.prox * v[k] for k in v}
            g = {k: g[k] + self.weight_decay * v[k] for k in v}
            heavy = {k: self.heavy_ball * heavy[k] + g[k] for k in v}
            v = {k: v[k] - lr * heavy[k] for k in v}
            taken += 1
        if self.method == "fedsmoo":
            self.mu_i[i] = mu
        return v, taken

    def round(self, active: Sequence[int]) -> None:
        w, n, lr = self.w, len(self.clients), self.lr * self.lr_decay**self.t
        updates, changes, counts = [], [], []
        for i in active:
            v, taken = self.train(i)
            d_i = {k: v[k] - w[k] for k in w}
            updates.append(d_i)
            counts.append(taken)
            if self.method in CONTROL_VARIATES:
                mine = self.c_i.get(i, self.zeros())
                fresh = {k: mine[k] - self.c[k] - d_i[k] / (taken * lr) for k in w}
                changes.append({k: fresh[k] - mine[k] for k in w})
                self.c_i[i] = fresh
            if self.method in DYNAMIC:
                mine = self.h_i.get(i, self.zeros())
                self.h_i[i] = {k: mine[k] + d_i[k] for k in w}
            if self.method in GLOBAL_ASCENT and self.reference == "received":
                self.old_i[i] = w
        shares = [len(self.clients[i][0]) if self.by_examples else 1 for i in active]
        d = {k: sum(s * u[k] for s, u in zip(shares, updates, strict=True)) / sum(shares) for k in w}

        if self.method in CONTROL_VARIATES:
            mean_change = {k: sum(change[k] for change in changes) / len(active) for k in w}
            self.c = {k: self.c[k] + len(active) / n * mean_change[k] for k in w}
        if self.method in MOMENTUM:
            mean_steps = sum(counts) / len(counts)
            self.m = {k: -d[k] / (mean_steps * lr) for k in w}
        if self.method == "fedsmoo":
            p = {k: sum(self.mu_i[i][k] for i in active) / len(active) for k in w}
            length = norm(p) + 1e-7
            self.s = {k: self.rho * p[k] / length for k in w}

        self.last_w, self.past = w, [w, *self.past[:-1]]
        if self.method == "fedadam":
            self.a = {k: 0.9 * self.a[k] + 0.1 * d[k] for k in w}
            self.b = {k: 0.99 * self.b[k] + 0.01 * d[k] ** 2 for k in w}
            self.w = {k: w[k] + self.lr_g * self.a[k] / (self.b[k] ** 0.5 + 0.01) for k in w}
        elif self.method in DYNAMIC:
            self.H = {k: self.H[k] + len(active) / n * d[k] for k in w}
            self.w = {k: w[k] + d[k] + self.H[k] for k in w}
        else:
            self.w = {k: w[k] + self.lr_g * d[k] for k in w}
        self.t += 1

    def states(self) -> dict[str, Tensor]:
        """All state the method needs, under the names of `worlds.states`."""
        known = {"round": torch.tensor(self.t), "weights": flat(self.w)}
        if self.method in CONTROL_VARIATES:
            known["correction.c"] = flat(self.c)
        if self.method in MOMENTUM:
            known["correction.m"] = flat(self.m)
        if self.method == "fedsmoo":
            known["perturbation.s"] = flat(self.s)
        if self.last_w is not None and (self.method in RELEASED or self.reference == "previous-round"):
            known["perturbation.old"] = flat(self.last_w)
        if self.method == "shuffled-s":
            known |= {f"perturbation.old{k}": flat(model) for k, model in enumerate(self.past)}
        if self.method in DYNAMIC:
            known["server.H"] = flat(self.H)
        if self.method == "fedadam":
            known |= {"server.a": flat(self.a), "server.b": flat(self.b)}
        for i in {i for _, i, _, _ in self.trace}:
            for slot, name, memories in (
                ("perturbation", "mu", self.mu_i),
                ("perturbation", "old", self.old_i),
                ("correction", "c", self.c_i),
                ("correction", "h", self.h_i),
            ):
                if i in memories:
                    known[f"client {i}.{slot}.{name}"] = flat(memories[i])
        return known

"""The round that every method of `family_oracle` shares: plain FedAvg in double precision, with places to differ.

Written from the mathematics alone, for reading: vectors are flat, every correction is written out at every step, and
the model's passes are `torch.func.functional_call`. Nothing here imports the package. What is random (the order of the
batches, the seeds of dropout masks) comes from outside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

Places = Tensor | slice
Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class World:
    """What a method is given."""

    model: nn.Module
    clients: Sequence[tuple[Tensor, Tensor]]
    batches: Callable[[int, int], list[Places]]
    """The batches of (round, client)."""
    mask: Callable[[int, int, int], int]
    """The seed of what layers draw in all passes of (round, client, step)."""
    lr: float
    lr_decay: float
    weight_decay: float
    clip: float
    clip_scope: str = "loss"
    momentum: float = 0.0


@dataclass
class Step:
    """Where a client is before a step."""

    client: int
    number: int
    """k."""
    steps: int
    """E_i."""
    v: Tensor
    start: Tensor
    """w, or the shifted start w'."""
    x: Tensor
    y: Tensor
    seed: int
    buffers: Buffers


@dataclass
class Answer:
    """What a client's round came to."""

    d: Tensor
    rates: list[float]
    """lr_k of every step."""
    buffers: Buffers

    @property
    def steps(self) -> int:
        return len(self.rates)


def unit(x: Tensor) -> Tensor:
    """u(x): over the whole vector, 0 for 0."""
    return x / (x.norm() + 1e-7)


def mean(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).sum(0) / len(vectors)


class FedAvg:
    """The base. `wrong` names a mistake to make on purpose; `p` are the method's hyper-parameters."""

    def __init__(self, world: World, wrong: str = "", **hyper: Any) -> None:
        self.world, self.wrong, self.p = world, wrong, SimpleNamespace(**hyper)
        parameters = dict(world.model.named_parameters())
        self.names, self.shapes = list(parameters), [p.shape for p in parameters.values()]
        self.N = len(world.clients)
        self.t = 0
        self.w = torch.cat([p.detach().double().reshape(-1) for p in parameters.values()])
        self.zero = torch.zeros_like(self.w)
        self.d = self.zero
        """The mean update of the last round in which somebody answered."""
        self.buffers: Buffers = {name: b.clone() for name, b in world.model.named_buffers()}
        self.clipped = self.taken = 0
        self.set_up()

    # where methods differ

    def set_up(self) -> None:
        """Server state before the first round."""

    def start(self) -> Tensor:
        """Where the clients start."""
        return self.w

    def open(self, i: int, start: Tensor) -> None:
        """Before a client's first step."""

    def ascent(self, step: Step) -> Tensor:
        """e."""
        return self.zero

    def descent(self, step: Step) -> Tensor:
        """The loss gradient of the step, before any clipping."""
        return self.gradient(step, step.v + self.ascent(step), keep=True)

    def rate(self, lr: float, k: int, steps: int) -> float:
        """lr_k."""
        return lr

    def correction(self, i: int, start: Tensor) -> tuple[float, float, Tensor]:
        """gain, pull and bias."""
        return 1.0, 0.0, self.zero

    def close(self, i: int, answer: Answer) -> None:
        """What a client keeps after its last step."""

    def land(self, answers: dict[int, Answer], asked: int) -> None:
        """The next w and the server's state, from `self.d`."""
        self.w = self.w + getattr(self.p, "lr_g", 1.0) * self.d

    # the model

    def pieces(self, vector: Tensor) -> dict[str, Tensor]:
        cut = vector.split([shape.numel() for shape in self.shapes])
        return {name: c.reshape(shape) for name, shape, c in zip(self.names, self.shapes, cut, strict=True)}

    def joined(self, pieces: dict[str, Tensor]) -> Tensor:
        return torch.cat([pieces[name].reshape(-1) for name in self.names])

    def logits(self, step: Step, at: Tensor, buffers: Buffers | None = None) -> Tensor:
        """In train mode with the step's masks. `buffers` are changed; without them the received ones are used, once."""
        used = {name: b.clone() for name, b in self.buffers.items()} if buffers is None else buffers
        torch.manual_seed(step.seed)
        self.world.model.train()
        out: Tensor = functional_call(self.world.model, {**self.pieces(at), **used}, (step.x,))
        return out

    def objective(self, step: Step, logits: Tensor) -> Tensor:
        """What the descent gradient is of."""
        return cross_entropy(logits, step.y)

    def gradient(self, step: Step, at: Tensor, keep: bool = False, of: Any = None) -> Tensor:
        """Of the objective, or of another function (step, logits). `keep`: this pass updates the buffers."""
        leaf = at.detach().clone().requires_grad_()
        buffers = step.buffers if keep else {name: b.clone() for name, b in step.buffers.items()}
        loss = (of or self.objective)(step, self.logits(step, leaf, buffers))
        return torch.autograd.grad(loss, leaf)[0]

    # the round

    def clip(self, g: Tensor) -> Tensor:
        factor = self.world.clip / (float(g.norm()) + 1e-6)
        self.taken += 1
        self.clipped += factor < 1
        return g * min(1.0, factor)

    def train(self, i: int) -> Answer:
        world, start = self.world, self.start()
        x, y = world.clients[i]
        lr = world.lr * world.lr_decay**self.t
        places = world.batches(self.t, i)
        buffers = {name: b.clone() for name, b in self.buffers.items()}
        v, heavy, rates = start.clone(), self.zero, []
        self.open(i, start)
        gain, pull, bias = self.correction(i, start)
        for k, place in enumerate(places):
            step = Step(i, k, len(places), v, start, x[place], y[place], world.mask(self.t, i, k), buffers)
            g = self.descent(step)
            if world.clip_scope == "loss":
                g = self.clip(g)
            g = gain * g + bias
            if world.clip_scope == "corrected":
                g = self.clip(g)
            decayed = v - (start - self.w) if self.wrong == "decay on the unshifted start" else v
            heavy = world.momentum * heavy + g + pull * v + world.weight_decay * decayed
            rates.append(self.rate(lr, k, len(places)))
            v = v - rates[-1] * heavy
        answer = Answer(v - start, rates, buffers)
        self.close(i, answer)
        return answer

    def round(self, active: Sequence[int], asked: int | None = None) -> None:
        """One round of the clients that answer; `asked` counts those that did not, too."""
        answers = {i: self.train(i) for i in active}
        if answers:
            self.d = mean([answer.d for answer in answers.values()])
            self.buffers = {name: self.merged([a.buffers[name] for a in answers.values()]) for name in self.buffers}
            self.land(answers, asked or len(active))
        self.t += 1

    def merged(self, buffers: list[Tensor]) -> Tensor:
        stacked = torch.stack(buffers)
        return stacked.double().mean(0).to(stacked.dtype) if stacked.is_floating_point() else stacked.amax(0)

    def mean_of(self, vectors: Sequence[Tensor]) -> Tensor:
        """Over S; or, as a mistake, their sum over N."""
        return mean(vectors) * (len(vectors) / self.N if self.wrong == "N for K" else 1.0)

    def play(self, schedule: Sequence[Sequence[int]]) -> list[Tensor]:
        """The global model after every round."""
        ends = []
        for active in schedule:
            self.round(active)
            ends.append(self.w)
        return ends

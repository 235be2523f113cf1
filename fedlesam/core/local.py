"""How a client trains: the settings of its local loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedlesam.core import seeds
from fedlesam.core.batches import Augment
from fedlesam.core.checks import check_count, check_params, param
from fedlesam.core.choices import RANGES, ClipScope
from fedlesam.core.slots import Algorithm
from fedlesam.core.task import Loss, Task

Epochs = int | range | Callable[[int, int], int]


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains. The defaults are the paper's for CIFAR-10."""

    lr: float = param(0.1, above=0)
    lr_decay: float | None = param(None, above=0)
    """Per round: lr * lr_decay ** round. None takes the method's own."""
    epochs: Epochs = 5
    """A number, a range to draw from for each client and round, or a function of (round, client)."""
    batch_size: int = param(50, **RANGES["batch_size"])
    weight_decay: float = param(1e-3, at_least=0)
    clip: float | None = param(10.0, above=0)
    """The largest gradient norm of a step; None never clips."""
    clip_scope: ClipScope = "loss"
    """Clip the loss gradient alone, or gain * g + bias, as FL-Simulator and the paper's experiments do."""
    momentum: float = param(0.0, at_least=0, below=1)
    """Heavy-ball momentum inside a round, from zero at its start. The paper uses none."""
    loss: Loss = F.cross_entropy
    """Of outputs and targets. For anything else give the federation a `Task`, and leave this as it is."""
    augment: Augment | None = None
    """Changes the inputs of a batch, where they are one tensor."""

    def __post_init__(self) -> None:
        check_params(self)
        ends = (*self.epochs[:1], *self.epochs[-1:]) if isinstance(self.epochs, range) else (self.epochs,)
        for epochs in ends or (0,):
            if not callable(epochs):
                check_count("LocalTraining", "epochs", epochs)

    def task(self, given: Task | None = None) -> Task:
        """The task that clients train: the given one, or that of `loss`.

        Args:
            given: what the user gave beside these settings.
        """
        if given is None:
            return Task.of_loss(self.loss)
        if self.loss is not F.cross_entropy:
            raise ValueError(
                "a task and LocalTraining(loss=...) both say how a batch becomes a loss; give the task alone, e.g. "
                "task=fl.Task.supervised(loss, metrics=...) for a loss of outputs and targets"
            )
        return given

    def lr_at(self, round: int, algorithm: Algorithm) -> float:
        try:
            return self.lr * (algorithm.lr_decay if self.lr_decay is None else self.lr_decay) ** round
        except OverflowError:
            return math.inf

    def check_decay(self, algorithm: Algorithm, rounds: int) -> None:
        """A ValueError where the learning rate stops being a number above 0."""
        lr = self.lr_at(rounds - 1, algorithm)
        if not 0 < lr < math.inf:
            decay = algorithm.lr_decay if self.lr_decay is None else self.lr_decay
            raise ValueError(
                f"LocalTraining: lr_decay {decay:g} makes the learning rate {lr:g} after {rounds} rounds, from "
                f"{self.lr:g}; give one nearer to 1, or fewer rounds"
            )

    def epochs_of(self, seed: int, round: int, client: int) -> int:
        if isinstance(self.epochs, range):
            rng = seeds.generator(seed, "epochs", round, client)
            return self.epochs[int(torch.randint(len(self.epochs), (), generator=rng))]
        if isinstance(self.epochs, int):
            return self.epochs
        epochs = self.epochs(round, client)
        check_count("LocalTraining", f"epochs(round={round}, client={client})", epochs)
        return epochs

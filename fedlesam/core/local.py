"""How a client trains: the settings of its local loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fedlesam.core import seeds
from fedlesam.core.batches import Augment
from fedlesam.core.checks import check_choice, check_count, check_number
from fedlesam.core.flat_model import Loss
from fedlesam.core.slots import Algorithm

Epochs = int | range | Callable[[int, int], int]


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains. The defaults are the paper's for CIFAR-10."""

    lr: float = 0.1
    lr_decay: float | None = None
    """Per round: lr * lr_decay ** round. None takes the method's own."""
    epochs: Epochs = 5
    """A number, a range to rng from for each client and round, or a function of (round, client)."""
    batch_size: int = 50
    weight_decay: float = 1e-3
    clip: float | None = 10.0
    """The largest gradient norm of a step; None never clips."""
    clip_scope: Literal["loss", "corrected"] = "loss"
    """Clip the loss gradient alone, or gain * g + bias, as FL-Simulator and the paper's experiments do."""
    momentum: float = 0.0
    """Heavy-ball momentum inside a round, from zero at its start. The paper uses none."""
    loss: Loss = F.cross_entropy
    augment: Augment | None = None

    def __post_init__(self) -> None:
        check_number("LocalTraining", "lr", self.lr, above=0)
        check_number("LocalTraining", "weight_decay", self.weight_decay, at_least=0)
        check_number("LocalTraining", "momentum", self.momentum, at_least=0)
        if self.lr_decay is not None:
            check_number("LocalTraining", "lr_decay", self.lr_decay, above=0)
        if self.clip is not None:
            check_number("LocalTraining", "clip", self.clip, above=0)
        if self.momentum >= 1:
            raise ValueError(f"LocalTraining: momentum must be below 1, got {self.momentum}")
        check_choice("LocalTraining", "clip_scope", self.clip_scope, ("loss", "corrected"))
        check_count("LocalTraining", "batch_size", self.batch_size)
        ends = (*self.epochs[:1], *self.epochs[-1:]) if isinstance(self.epochs, range) else (self.epochs,)
        for epochs in ends or (0,):
            if not callable(epochs):
                check_count("LocalTraining", "epochs", epochs)

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

"""How a client trains: the settings of its local loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedlesam.core import schedule, seeds
from fedlesam.core.batches import Augment
from fedlesam.core.checks import check_count, check_number, check_params, param
from fedlesam.core.choices import RANGES, ClipScope, Optimizer
from fedlesam.core.slots import Algorithm
from fedlesam.core.task import Loss, Task

Epochs = int | float | range | Callable[[int, int], int | float]
Rate = float | str | Callable[[int], float]


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains. The defaults are the paper's for CIFAR-10."""

    lr: Rate = schedule.START
    """A number, a function of the round, or a schedule by name such as "0.05,warmup:5,cosine:100"; "0.1" is 0.1."""
    lr_decay: float | None = param(None, above=0)
    """Per round, where lr is a number: lr * lr_decay ** round. None takes the method's own, 1 keeps it constant."""
    epochs: Epochs = 5
    """A number, a range to draw from for each client and round, or a function of (round, client).

    Of 0.5 epochs a client takes the first half of the batches of an epoch, rounded up to whole ones.
    """
    steps: int | None = param(None, at_least=1, whole=True)
    """Local steps instead of epochs, the same for every client."""
    batch_size: int = param(50, **RANGES["batch_size"])
    """Samples of a step; the last batch of an epoch may be smaller."""
    weight_decay: float = param(1e-3, at_least=0)
    """A factor of v that is added to the gradient; AdamW applies it beside the gradient."""
    clip: float | None = param(10.0, above=0)
    """The largest gradient norm of a step; None never clips."""
    clip_scope: ClipScope = "loss"
    """Clip the loss gradient alone, or gain * g + bias, as FL-Simulator and the paper's experiments do."""
    momentum: float = param(0.0, at_least=0, below=1)
    """Heavy-ball momentum inside a round, from zero at its start. The paper uses none."""
    optimizer: Optimizer = "sgd"
    """"adamw": torch.optim.AdamW's step with its defaults, from zero moments at the start of a round."""
    loss: Loss = F.cross_entropy
    """Of outputs and targets. For anything else give the federation a `Task`, and leave this as it is."""
    augment: Augment | None = None
    """Changes the inputs of a batch, where they are one tensor."""

    def __post_init__(self) -> None:
        check_params(self)
        ends = (*self.epochs[:1], *self.epochs[-1:]) if isinstance(self.epochs, range) else (self.epochs,)
        for epochs in ends or (0,):
            if not callable(epochs):
                _check_epochs("epochs", epochs)
        if self.steps is not None and self.epochs != type(self).epochs:
            raise ValueError(f"LocalTraining: steps={self.steps} and epochs={self.epochs!r}: give one of the two")
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(f"LocalTraining: momentum is for sgd, {self.optimizer} has its own; leave it at 0")
        if isinstance(self.lr, str):
            object.__setattr__(self, "lr", schedule.number_or_schedule(self.lr))
        if not (callable(self.lr) or isinstance(self.lr, str)):
            check_number("LocalTraining", "lr", self.lr, above=0)
        if not isinstance(self.lr, int | float) and self.lr_decay is not None:
            raise ValueError(
                f"LocalTraining: lr_decay {self.lr_decay:g} goes with an lr that is a number; "
                f"in a schedule write lr='0.1,decay:{self.lr_decay:g}'"
            )

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
        """The learning rate of a round, which the method may change inside it.

        Args:
            round: From 0.
            algorithm: The method; its decay counts where lr is a number and has none of its own.
        """
        if callable(self.lr):
            try:
                lr = self.lr(round)
            except Exception as error:
                raise ValueError(f"LocalTraining: lr(round={round}) raises {type(error).__name__}: {error}") from error
            check_number("LocalTraining", f"lr(round={round})", lr, above=0)
            return float(lr)
        try:
            if isinstance(self.lr, str):
                return schedule.parse(self.lr)(round)
            return self.lr * (algorithm.lr_decay if self.lr_decay is None else self.lr_decay) ** round
        except OverflowError:
            return math.inf

    def check(self, algorithm: Algorithm, rounds: int = 1) -> None:
        """A ValueError where the learning rate stops being a number above 0, or the method needs another optimizer.

        Args:
            algorithm: The method.
            rounds: In total.
        """
        if self.optimizer != "sgd" and not algorithm.correction.any_optimizer:
            name = type(algorithm.correction).__name__
            raise ValueError(
                f"LocalTraining: {name} treats a client's update as the sum of its SGD steps, which is wrong for "
                f"{self.optimizer}; use sgd, or a method without it (fedavg, fedsam, fedlesam, fedprox, feddyn)"
            )
        if callable(self.lr) or 0 < (lr := self.lr_at(rounds - 1, algorithm)) < math.inf:
            return
        if isinstance(self.lr, str):
            raise ValueError(
                f"LocalTraining: lr {self.lr!r} is {lr:g} after {rounds} rounds; the schedule was made for fewer, so "
                "a run of more rounds is another run: give one that lasts, or fewer rounds"
            )
        decay = algorithm.lr_decay if self.lr_decay is None else self.lr_decay
        raise ValueError(
            f"LocalTraining: lr_decay {decay:g} makes the learning rate {lr:g} after {rounds} rounds, from "
            f"{self.lr:g}; give one nearer to 1, or fewer rounds"
        )

    def steps_of(self, seed: int, round: int, client: int, per_epoch: int) -> int:
        """The local steps of a client in a round.

        Args:
            seed: Of the run.
            round: From 0.
            client: Its number.
            per_epoch: The batches of one of its epochs.
        """
        if self.steps is not None:
            return self.steps
        epochs = self.epochs
        if isinstance(epochs, range):
            rng = seeds.generator(seed, "epochs", round, client)
            epochs = epochs[int(torch.randint(len(epochs), (), generator=rng))]
        elif callable(epochs):
            epochs = epochs(round, client)
            _check_epochs(f"epochs(round={round}, client={client})", epochs)
        return steps_in(epochs, per_epoch)


def steps_in(epochs: int | float, per_epoch: int) -> int:
    """The batches of some epochs; a part of an epoch is rounded up to whole batches.

    Args:
        epochs: How many.
        per_epoch: The batches of one.
    """
    return epochs * per_epoch if isinstance(epochs, int) else math.ceil(epochs * per_epoch - 1e-9)


def _check_epochs(name: str, epochs: object) -> None:
    if isinstance(epochs, float):
        check_number("LocalTraining", name, epochs, above=0)
    else:
        check_count("LocalTraining", name, epochs)

"""Differential privacy of clients in a simulation: clipped updates, a noisy mean, and the epsilon that it costs."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.checks import check_params, param

log = logging.getLogger("fedlesam")

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512)
"""Of the Renyi divergence, over which the accountant takes its minimum."""


@dataclass(frozen=True)
class Privacy:
    """Between clients and server: an update of norm at most `clip`, and Gaussian noise on the mean of a round.

    The mean is the sum of the updates divided by K, the clients that were *asked*, so that one that does not answer
    hides behind the noise as well. Every coordinate gets a normal number of deviation noise * clip / K.

    Args:
        clip: the largest norm of an update.
        noise: the deviation of the noise on the sum, in units of `clip`.
        delta: for which epsilon is computed; 0 is 1 / N.
    """

    clip: float = param(0.2, above=0)
    noise: float = param(0.95, at_least=0)
    delta: float = param(0.0, at_least=0, below=1)

    def __post_init__(self) -> None:
        check_params(self)

    def check_buffers(self, changed: Sequence[str]) -> None:
        """A ValueError for a model whose buffers change in training.

        Args:
            changed: The names of the buffers that training changes.
        """
        if changed:
            raise ValueError(
                f"privacy: the buffers {', '.join(changed)} change in training and would be sent without noise; use a "
                "model without such, e.g. with GroupNorm"
            )

    def clipped(self, update: Tensor) -> Tensor:
        """The update, scaled down to the norm `clip`; in place.

        Args:
            update: Of a client; overwritten.
        """
        return update.mul_((self.clip / update.norm().clamp(min=1e-30)).clamp(max=1.0))

    def noisy(self, mean: Tensor, answered: int, asked: int, seed: int, round: int) -> Tensor:
        """The mean over those asked, with noise, from the mean over those that answered.

        Args:
            mean: Over the updates that arrived.
            answered: The clients that answered.
            asked: The clients that were drawn.
            seed: Of the run; the noise derives from it.
            round: From 0.
        """
        draw = seeds.generator(seed, "privacy", round)
        noise = torch.randn(mean.shape, generator=draw, dtype=mean.dtype).to(mean.device)
        return (mean * (answered / asked)).add_(noise, alpha=self.noise * self.clip / asked)

    def epsilon(self, clients: int, asked: int, rounds: int) -> float | None:
        """What so many rounds have cost, each with `asked` of `clients` drawn without replacement; None: not known.

        Args:
            clients: All there are.
            asked: Drawn in every round.
            rounds: Done.
        """
        delta = self.delta or 1 / clients
        return _epsilon(self.noise, clients, asked, rounds, delta) if self.noise else None


@functools.cache
def _epsilon(noise: float, clients: int, asked: int, rounds: int, delta: float) -> float | None:
    """Neighbours differ in one client's samples, which moves the sum by up to twice the clipping norm."""
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        _say_once()
        return None
    accountant = RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(noise / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(clients, asked, gaussian), rounds)
    return float(accountant.get_epsilon(delta))


@functools.cache
def _say_once() -> None:
    log.warning("epsilon is not computed: install the accountant with pip install 'fedlesam[privacy]'")

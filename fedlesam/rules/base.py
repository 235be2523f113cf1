"""What the three kinds of rule have in common: their state, and the results they are told about."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

State = dict[str, Tensor]
"""Named vectors of one slot: `mine` stays with a client, `ours` is broadcast by the server, an upload is sent to it."""


@dataclass(frozen=True)
class LocalResult:
    """What one client did in one round."""

    update: Tensor
    """d_i = v_i(end) - w"""
    steps: int
    """E_i, the local steps it really took"""
    lr: float


@dataclass(frozen=True)
class RoundResult:
    """What the active clients that answered did in one round, as means over them."""

    anchor: Tensor
    """w, the global model the round started from"""
    update: Tensor
    """d, the mean of the d_i"""
    steps: float
    """the mean of the E_i"""
    lr: float
    share: float
    """K / N, the clients that answered over all clients"""
    uploads: State
    """the mean of what the slot's rule had the clients upload"""


@dataclass(frozen=True)
class Rule:
    """A frozen set of hyper-parameters with pure methods; override what the rule needs."""

    plain_mean: ClassVar[bool] = False
    """The rule is correct only if the server averages clients plainly: weighting them by examples is refused."""

    def initial(self, anchor: Tensor) -> State:
        """The server's state of this slot before the first round."""
        return {}

    def forget(self, ours: State, sent: State, share: float) -> State:
        """`ours` without a client whose memory is lost. Override it where `ours` is a sum over clients.

        `sent` is the sum of all it ever uploaded for this slot, for a server rule of its updates (`update`); `share`
        is 1 / N.
        """
        return ours

"""What the server does in one round: from the mean of the answers to the next global model."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedlesam.core.messages import Broadcast
from fedlesam.core.reduction import Reduction
from fedlesam.core.slots import Algorithm, RoundResult, State
from fedlesam.core.state import flatten, unflatten


@dataclass(frozen=True)
class ServerState:
    """All the server knows after `round` rounds. A new one is made every round; nothing is changed in place."""

    round: int
    """Rounds done."""
    weights: Tensor
    """w, the global model, flat."""
    buffers: Mapping[str, Tensor]
    """Of the global model, by name."""
    perturbation: State
    """What the perturbation's rule keeps at the server."""
    correction: State
    """What the correction keeps at the server."""
    server: State
    """What the server rule keeps."""

    @classmethod
    def initial(cls, algorithm: Algorithm, weights: Tensor, buffers: Mapping[str, Tensor]) -> "ServerState":
        """Before the first round.

        Args:
            algorithm: The method.
            weights: Of the first global model, flat.
            buffers: Of the first global model, by name.
        """
        slots = (rule.initial(weights) for rule in (algorithm.perturbation, algorithm.correction, algorithm.server))
        return cls(0, weights, buffers, *slots)

    def sent(self, algorithm: Algorithm) -> Broadcast:
        """What the active clients of the next round are sent: the model that they start from, which may not be w.

        Args:
            algorithm: The method, whose server rule may shift the start.
        """
        start = algorithm.server.at(self.round).start(self.server, self.weights)
        return Broadcast(self.round, start, self.buffers, self.perturbation, self.correction)

    def broadcast(self) -> Broadcast:
        """The global model, to be evaluated, and what the rules broadcast with it."""
        return Broadcast(self.round, self.weights, self.buffers, self.perturbation, self.correction)

    def flatten(self) -> State:
        """Its tensors as one flat dict."""
        return self.broadcast().flatten() | flatten(server=self.server)

    @classmethod
    def unflatten(cls, round: int, tensors: Mapping[str, Tensor]) -> "ServerState":
        """The state after `round` rounds from what `flatten` returned.

        Args:
            round: Rounds done.
            tensors: The flat dict.
        """
        slots = dict(tensors)
        return cls(round, slots.pop("weights"), **unflatten(slots, "buffers", "perturbation", "correction", "server"))


def server_step(
    algorithm: Algorithm, state: ServerState, reduction: Reduction, clients: int, asked: int = 0, seed: int = 0
) -> ServerState:
    """The next global model and state, from the answers of K of `clients` clients; without answers all stays.

    `asked` is the number of clients that were drawn, and `seed` that of the run, for the noise of privacy.

    Args:
        algorithm: The method.
        state: Before the round.
        reduction: The answers, summed.
        clients: N, all clients.
        asked: The clients that were drawn, for the noise of privacy.
        seed: Of the run, for the same.
    """
    if not reduction.summaries:
        return dataclasses.replace(state, round=state.round + 1)
    algorithm, dtype, share = algorithm.at(state.round), state.weights.dtype, len(reduction.summaries) / clients
    update, (e, c) = reduction.mean_update(dtype), (reduction.mean(s, dtype) for s in ("perturbation", "correction"))
    reduction.keep_update()
    if algorithm.privacy is not None:
        update = algorithm.privacy.noisy(update, len(reduction.summaries), asked, seed, state.round)
    norm = reduction.norm if algorithm.privacy is None else math.nan  # it has no noise
    means = state.weights, update, reduction.steps, reduction.lr, share
    weights, server = algorithm.server.step(state.server, RoundResult(*means, c, norm))
    perturbation = algorithm.perturbation.aggregate(state.perturbation, RoundResult(*means, e, norm, weights))
    correction = algorithm.correction.aggregate(state.correction, RoundResult(*means, c, norm, weights))
    return ServerState(state.round + 1, weights, reduction.mean_buffers(), perturbation, correction, server)

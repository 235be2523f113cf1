"""What a method costs by its nature, counted on two rounds of the smallest problem rather than typed in."""

from dataclasses import dataclass

import torch
from torch import nn

from fedlesam.algorithms import Algorithm
from fedlesam.federation import Federation
from fedlesam.local import LocalTraining


@dataclass(frozen=True)
class Cost:
    """In units of FedAvg's, once the method is under way."""

    passes: float
    """Backward passes per local step."""
    down: float
    """Model-sized vectors a client receives per round."""
    up: float
    """And sends."""
    stored: float
    """Model-sized vectors a client holds between its rounds, the model itself included."""


def measure(algorithm: Algorithm) -> Cost:
    model = nn.Linear(1, 1, bias=False)
    clients = [(torch.ones(1, 1), torch.ones(1, 1))] * 2
    federation = Federation(model, clients, algorithm, LocalTraining(epochs=1, loss=nn.functional.mse_loss))
    federation.round()
    record = federation.round()
    unit = federation.weights.nbytes
    memory = federation.memories[0].nbytes
    share = len(clients) * unit
    return Cost(
        passes=record.backward_passes / len(clients),
        down=record.bytes_down / share,
        up=record.bytes_up / share,
        stored=1 + memory / unit,
    )

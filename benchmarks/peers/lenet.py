"""The LeNet and the mlp of `fedlesam.models.small`, without our package."""

from torch import nn

PARAMETERS = {"lenet": 797_962, "mlp": 4_810}
SHAPES = {"lenet": (3, 32, 32), "mlp": (1, 8, 8)}


def mlp() -> nn.Module:
    """Two layers, for clients so small that overhead decides."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, 10),
    )

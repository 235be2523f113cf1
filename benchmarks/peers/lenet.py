"""The LeNet of `fedlesam.models.small.lenet` for 3x32x32 pictures and 10 classes, without our package."""

from torch import nn

PARAMETERS = 797_962


def lenet() -> nn.Module:
    model = nn.Sequential(
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
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
    return model

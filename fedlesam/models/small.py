"""Small networks for CPUs. Their sizes follow the data."""

import math

from torch import Tensor, nn

from fedlesam.core.checks import check_count

Shape = tuple[int, ...]
"""channels, height, width; or the shape of a sample of one's own data"""


def check_width(name: str, width: int, even: bool = True) -> None:
    """Refuse a number of channels that cannot be.

    Args:
        name: The network's.
        width: The number.
        even: Whether it is divided into the 2 groups of GroupNorm.
    """
    check_count(name, "width", width, at_least=2)
    if width % 2 and even:
        raise ValueError(f"{name}: width must be even, GroupNorm has 2 groups, got {width}")


def mlp(shape: Shape, classes: int, hidden: int = 64) -> nn.Module:
    """One hidden layer.

    Args:
        shape: (channels, height, width) of an input.
        classes: The number of classes.
        hidden: The width of the hidden layer.
    """
    check_count("mlp", "hidden", hidden)
    inputs = math.prod(shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class FirstRow(nn.Module):
    """The first row of each sample: frozen features have an image's views as rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 0].flatten(1)


def head(shape: Shape, classes: int, hidden: int = 128) -> nn.Module:
    """One hidden layer, or none, on the first row of a sample: for frozen features.

    Args:
        shape: (1, views, features) of an input.
        classes: The number of classes.
        hidden: The width of the hidden layer; 0 makes the head linear.
    """
    check_count("head", "hidden", hidden, at_least=0)
    inputs = shape[0] * shape[2]
    if not hidden:
        return nn.Sequential(FirstRow(), nn.Linear(inputs, classes))
    return nn.Sequential(FirstRow(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cnn(shape: Shape, classes: int, width: int = 16) -> nn.Module:
    """Three 3x3 convolutions with GroupNorm and a linear head on the mean over the picture.

    Args:
        shape: (channels, height, width) of an input.
        classes: The number of classes.
        width: The channels of the first convolution, an even number; the others have two and four times as many.
    """
    check_width("cnn", width)

    def block(inputs: int, outputs: int, *more: nn.Module) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(2, outputs), nn.ReLU(), *more]

    return nn.Sequential(
        *block(shape[0], width, nn.MaxPool2d(2, ceil_mode=True)),
        *block(width, 2 * width, nn.MaxPool2d(2, ceil_mode=True)),
        *block(2 * width, 4 * width, nn.AdaptiveAvgPool2d(1)),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def lenet(shape: Shape, classes: int) -> nn.Module:
    """The LeNet of the federated literature (Acar et al., FedDyn, ICLR 2021): two 5x5 convolutions of 64, 384, 192.

    Pictures below 16 pixels are padded in the convolutions, which would otherwise have nothing left.

    Args:
        shape: (channels, height, width) of an input.
        classes: The number of classes.
    """
    channels, height, width = shape
    padding = 2 if min(height, width) < 16 else 0

    def after(pixels: int) -> int:
        for _ in range(2):
            pixels = (pixels + 2 * padding - 4) // 2
        return pixels

    def block(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 64, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]

    convolutions = [*block(channels), *block(64), nn.Flatten()]
    hidden = [nn.Linear(64 * after(height) * after(width), 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU()]
    return nn.Sequential(*convolutions, *hidden, nn.Linear(192, classes))

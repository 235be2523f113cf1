"""ResNet-18 with GroupNorm, the paper's network for CIFAR. Names and shapes are torchvision's, so weights carry over.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016; the ImageNet stem, as the paper's baselines have it.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from fedlesam.core.checks import check_choice
from fedlesam.models.small import Shape, check_width

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two convolutions with normalisation, and a shortcut.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Of the first convolution and of the shortcut.
        norm: Makes a normalisation layer for a number of channels.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        shortcut: Tensor = x if self.downsample is None else self.downsample(x)
        joined: Tensor = self.relu(out + shortcut)
        return joined


class ResNet18(nn.Module):
    """The network that `resnet18` makes.

    Args:
        channels: Of the images.
        classes: Outputs of the head.
        width: Channels of the first stage; each later one has twice as many.
        norm: Makes a normalisation layer for a number of channels.
    """

    def __init__(self, channels: int, classes: int, width: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = self._layer(width, width, 1, norm)
        self.layer2 = self._layer(width, 2 * width, 2, norm)
        self.layer3 = self._layer(2 * width, 4 * width, 2, norm)
        self.layer4 = self._layer(4 * width, 8 * width, 2, norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inputs, outputs, stride, norm), BasicBlock(outputs, outputs, 1, norm))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(shape: Shape, classes: int, width: int = 64, norm: Literal["group", "batch"] = "group") -> nn.Module:
    """ResNet-18; `width=16` makes it narrow, `norm="batch"` uses BatchNorm in place of GroupNorm with 2 groups.

    Args:
        shape: (channels, height, width) of an input.
        classes: The number of classes.
        width: The channels of the first stage.
        norm: "group" or "batch".
    """
    check_choice("resnet18", "norm", norm, ("group", "batch"))
    check_width("resnet18", width, even=norm == "group")
    make: Norm = (lambda n: nn.GroupNorm(2, n)) if norm == "group" else nn.BatchNorm2d
    return ResNet18(shape[0], classes, width, make)

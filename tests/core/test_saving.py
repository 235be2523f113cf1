"""A module in a file: all of it, or where a part is frozen what was trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedlesam.core.saving import load_trained, save_trained


class Tied(nn.Module):
    """A frozen layer, a trained one, one tied to it, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base, self.head, self.again = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.again.weight = self.head.weight
        self.register_buffer("mean", torch.zeros(2))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw)


def frozen(seed: int) -> Tied:
    made = Tied(seed)
    made.base.requires_grad_(False)
    return made


def test_frozen_weights_are_not_in_the_file(tmp_path: Path) -> None:
    trained = frozen(0)
    with torch.no_grad():
        trained.head.weight.add_(1)
        trained.mean.add_(2)
    save_trained(trained, tmp_path / "m")
    assert sorted(load_file(tmp_path / "m")) == ["again.bias", "head.bias", "head.weight", "mean"]
    fresh = frozen(0)
    load_trained(fresh, tmp_path / "m")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in trained.state_dict().items())
    assert fresh.again.weight is fresh.head.weight


def test_another_base_is_refused(tmp_path: Path) -> None:
    save_trained(frozen(0), tmp_path / "m")
    with pytest.raises(ValueError, match="frozen weights are not those that it was trained with"):
        load_trained(frozen(1), tmp_path / "m")
    other = frozen(0)
    other.more = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=r"its tensors differ: more\.weight, more\.bias"):
        load_trained(other, tmp_path / "m")


def test_without_frozen_weights_all_of_it_is_there(tmp_path: Path) -> None:
    save_trained(Tied(0), tmp_path / "m")
    assert {"base.weight", "base.bias"} <= load_file(tmp_path / "m").keys()
    fresh = Tied(1)
    load_trained(fresh, tmp_path / "m")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in Tied(0).state_dict().items())

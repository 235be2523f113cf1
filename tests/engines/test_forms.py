"""Which models can stand for each other in a shared stack."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlesam.core.flat_model import FlatModel
from fedlesam.engines._forms import model_form


class Holds(nn.Linear):
    """What its text does not show."""

    def __init__(self, held: Any) -> None:
        super().__init__(6, 3)
        self.held: Any = held


class Config:
    """As of a transformer: it says what it is equal to."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and other.size == self.size

    __hash__ = None  # type: ignore[assignment]


class Calls:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, *given: Any) -> Any:
        return given[-1] * self.factor


def encoder(activation: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, 0.0, activation, batch_first=True)


def hooked(factor: float) -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.register_forward_hook(Calls(factor))
    return layer


def looped(_: float) -> nn.Module:
    module, around = Holds(1.0), list[Any]()
    around.append(around)
    module.held = around
    return module


ALIKE: dict[str, tuple[Callable[[Any], nn.Module], Any, Any, Any]] = {
    "number": (Holds, 2.0, 2.0, 3.0),
    "nan": (Holds, float("nan"), float("nan"), 0.0),
    "numpy": (Holds, np.float32(0.5), np.float32(0.5), np.float32(0.25)),
    "list": (Holds, [2.0, "a"], [2.0, "a"], [2.0, "b"]),
    "dict": (Holds, {"a": (1, 2)}, {"a": (1, 2)}, {"a": (1, 3)}),
    "partial": (Holds, partial(max, 1), partial(max, 1), partial(max, 2)),
    "configuration": (Holds, Config(3), Config(3), Config(4)),
    "activation": (encoder, "relu", "relu", "gelu"),
    "lstm": (lambda size: nn.LSTM(4, size), 5, 5, 6),
    "weight norm": (lambda size: nn.utils.parametrizations.weight_norm(nn.Linear(4, size)), 3, 3, 4),
}
"""Models made of the first two are alike, of the third not."""


@pytest.mark.parametrize("name", ALIKE)
def test_models_made_alike_share_a_stack(name: str) -> None:
    make, *given = ALIKE[name]
    one, two, other = (model_form(FlatModel(make(value))) for value in given)
    assert one == two
    assert one != other


@pytest.mark.parametrize("make", [lambda k: encoder(Calls(k)), hooked, looped, lambda k: Holds(torch.tensor(k))])
def test_models_with_something_that_cannot_be_compared_are_alike_to_themselves(make: Callable[[float], Any]) -> None:
    one, other = FlatModel(make(2.0)), FlatModel(make(2.0))
    assert model_form(one) == model_form(one)
    assert model_form(one) != model_form(other)


def test_what_a_model_keeps_later_is_no_part_of_it() -> None:
    """Its form is that of the beginning: a list that grows is not looked at again."""
    module = Holds([])
    form, same = model_form(FlatModel(module)), model_form(FlatModel(Holds([])))
    module.held.append(torch.ones(2))
    assert form == same


class Doubles(nn.Module):
    def forward(self, *given: Any) -> Tensor:
        result: Tensor = given[-1] * 2
        return result


def test_a_hook_that_is_a_module_counts() -> None:
    plain, hooked = nn.Linear(6, 3), nn.Linear(6, 3)
    hooked.register_forward_hook(Doubles())
    assert model_form(FlatModel(plain)) != model_form(FlatModel(hooked))
    other = nn.Linear(6, 3)
    other.register_forward_hook(nn.Identity())
    assert model_form(FlatModel(other)) != model_form(FlatModel(hooked))

"""What two models must have in common so that one can stand for the other in a shared stack."""

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fedlesam.core.flat_model import FlatModel
from fedlesam.engines._replay import is_known

PLAIN = (bool, int, str, bytes, complex, type(None), type, Enum, PurePath, torch.dtype, torch.device)
INNER = ("_parameters", "_buffers", "_modules", "training")
"""What is compared by itself; hooks of state dicts are for files."""
FUNCTIONS = (FunctionType, BuiltinFunctionType)
"""Equal if they are the same one."""


def model_form(model: FlatModel) -> tuple[object, ...]:
    """Equal for models that one of them can stand for: what is no weight may differ from run to run.

    Args:
        model: of a federation.
    """
    own = bool(model.state.tensors()) or any(not p.requires_grad for p in model.module.parameters())
    shapes = tuple(zip(model.names, model.shapes, strict=True))
    settings = [_settings(module) for module in model.module.modules()]
    alone = id(model) if own else None
    return str(model.module), settings, shapes, model.weights.dtype, model.device, model.precision, alone


def _settings(module: nn.Module) -> tuple[type, list[tuple[str, object]]]:
    """The class of a module and its attributes as they are now."""
    kind = type(module).__mro__[1] if is_parametrized(module) else type(module)
    given = [(name, value) for name, value in vars(module).items() if name not in INNER and "state_dict" not in name]
    return kind, [(name, _frozen(value)) for name, value in given if not (is_known(kind) and _is_inert(value))]


def _is_inert(value: object) -> bool:
    """Parameters that a module of PyTorch keeps once more, as its LSTM does, and references to them."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_inert, value.values()))
    if isinstance(value, tuple | list | set | frozenset):
        return bool(value) and all(map(_is_inert, value))
    return isinstance(value, nn.Parameter | weakref.ref)


def _frozen(value: Any, around: tuple[int, ...] = ()) -> object:
    """What an attribute has in it, as far as that can be compared."""
    if isinstance(value, float):
        return value if value == value else "nan"
    if isinstance(value, (*PLAIN, *FUNCTIONS)):
        return value
    if isinstance(value, np.generic):
        return _frozen(value.item())
    if id(value) in around:
        return _Same(value)
    around = (*around, id(value))
    if isinstance(value, functools.partial):
        return "partial", [_frozen(part, around) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, Mapping):
        return type(value), [(_frozen(key, around), _frozen(item, around)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [_frozen(item, around) for item in value]
    if isinstance(value, set | frozenset) and all(isinstance(item, PLAIN) for item in value):
        return frozenset(value)
    return _Same(value)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object: equal to itself, and to what it says it is equal to, as a configuration does."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        if other.value is self.value:
            return True
        try:
            equal = self.value == other.value
        except Exception:
            return False
        return equal is True

    def __hash__(self) -> int:
        return 0

"""A network by the text a user types, e.g. `resnet18:width=16,norm=batch`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedlesam.core import seeds
from fedlesam.core.names import imported, is_path, unknown
from fedlesam.models.efficientnet import efficientnet_lite0
from fedlesam.models.resnet import resnet18
from fedlesam.models.small import Shape, cnn, head, lenet, mlp
from fedlesam.models.text import char_gru, text_bag, text_transformer
from fedlesam.models.vit import vit_b32

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "head": head,
    "cnn": cnn,
    "lenet": lenet,
    "resnet18": resnet18,
    "efficientnet-lite0": efficientnet_lite0,
    "vit-b32": vit_b32,
    "char-gru": char_gru,
    "text-bag": text_bag,
    "text-transformer": text_transformer,
}
"""The networks by the names that `make_model` and `--model` take."""

TEXT = ("norm", "weights")
"""Options that are not whole numbers."""
FROM_DATA = ("shape", "classes", "vocabulary")
"""Arguments that follow from the data set."""


def make_model(spec: str, shape: Shape, classes: int, seed: int, vocabulary: int = 0) -> nn.Module:
    """Make a network by name. Its weights depend on the seed only; global random state is not touched.

    Args:
        spec: A name of `MODELS` with options, e.g. `resnet18:width=16,norm=batch`, or `module:callable`, which is
            called with those of `shape`, `classes` and `vocabulary` that it takes.
        shape: (channels, height, width) of an input; of a text (tokens,).
        classes: The number of classes.
        seed: Of the initial weights.
        vocabulary: The number of tokens, where the inputs are token numbers.

    Raises:
        ValueError: The name or an option is not known, or the network cannot be made for this shape.
    """
    with seeds.preserve_rng(torch.device("cpu")):
        torch.manual_seed(seeds.derive(seed, "model"))
        name, _, options = spec.partition(":")
        if name in MODELS:
            try:
                given = {"vocabulary": vocabulary} if _reads_tokens(spec, name, vocabulary) else {}
                return MODELS[name](shape, classes, **given, **_options(spec, options, MODELS[name]))
            except (RuntimeError, ZeroDivisionError, IndexError) as error:
                raise ValueError(f"model {spec}: cannot be made for inputs of shape {shape}: {error}") from error
        if not is_path(spec):
            raise unknown("model", spec, [*MODELS, "module:callable"])
        make = imported("model", spec)
        if not callable(make):
            raise ValueError(f"model {spec}: expected a callable that makes an nn.Module, got {make!r}")
        takes = inspect.signature(make).parameters
        known = zip(FROM_DATA, (shape, classes, vocabulary), strict=True)
        model = make(**{key: value for key, value in known if key in takes})
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {spec}: must make an nn.Module, got {type(model).__name__}")
        return model


def _reads_tokens(spec: str, name: str, vocabulary: int) -> bool:
    """Whether a network takes token numbers; a ValueError unless the data set has just what it takes."""
    reads = "vocabulary" in inspect.signature(MODELS[name]).parameters
    if reads and not vocabulary:
        raise ValueError(f"model {spec}: reads token numbers, but the samples are something else; use it for texts")
    if vocabulary and not reads:
        texts = [other for other, make in MODELS.items() if "vocabulary" in inspect.signature(make).parameters]
        raise ValueError(f"model {spec}: the samples are token numbers, which it does not read; use {', '.join(texts)}")
    return reads


def _options(spec: str, text: str, make: Callable[..., nn.Module]) -> dict[str, Any]:
    known = [name for name in inspect.signature(make).parameters if name not in FROM_DATA]
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise ValueError(f"model {spec}: unknown option {key!r}; it takes {', '.join(known) or 'none'}")
        if key not in TEXT and not value.isdecimal():
            raise ValueError(f"model {spec}: {key} must be a whole number, got {value!r}")
        options[key] = value if key in TEXT else int(value)
    return options

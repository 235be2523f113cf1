"""A user's own data: a callable that returns a DataSet, or ((x, y), (x, y))."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlesam.data.cache import fingerprint, statistics
from fedlesam.data.dataset import DataSet, Images
from fedlesam.data.source import Arrays, check_labels
from fedlesam.names import imported


def load_own(name: str) -> DataSet:
    """Call `module:callable` without arguments and check what it returns."""
    make = imported("data", name)
    if not callable(make):
        raise ValueError(f"data {name!r}: is a {type(make).__name__}, not a callable")
    made = make()
    data = made if isinstance(made, DataSet) else _from_tensors(name, made)
    _check(name, data)
    return data if data.fingerprint else replace(data, fingerprint=_fingerprint(data))


def _from_tensors(name: str, made: Any) -> DataSet:
    parts = []
    shapely = isinstance(made, tuple | list) and len(made) == 2
    if not (shapely and all(isinstance(part, tuple | list) and len(part) == 2 for part in made)):
        raise ValueError(
            f"data {name!r}: returned {_describe(made)}; expected a DataSet or "
            "((train_x, train_y), (test_x, test_y)) of tensors"
        )
    for part, (x, y) in zip(("train", "test"), made, strict=True):
        for what, value in (("x", x), ("y", y)):
            if not isinstance(value, Tensor):
                raise ValueError(f"data {name!r}: {part} {what} is {_describe(value)}; expected a tensor")
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"data {name!r}: {part} y is {y.dtype}; expected whole class numbers")
        x = x.detach().cpu()
        parts.append(Images(x if x.dtype == torch.uint8 else x.float(), y.detach().cpu().long()))
    train, test = parts
    for part, images in (("train", train), ("test", test)):
        _check_part(name, part, images)
    classes = tuple(str(i) for i in range(int(train.y.max()) + 1))
    channels = train.x.shape[1]
    if train.x.dtype == torch.uint8:
        mean, std = statistics(train.x.numpy())
        return DataSet(name, train, test, classes, mean, std)
    return DataSet(name, train, test, classes, (0.0,) * channels, (1.0,) * channels, scale=1.0)


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:4])})"
    return f"a {type(value).__name__}"


def _check_part(name: str, part: str, images: Images) -> None:
    where = f"data {name!r}: {part}"
    x, y = images.x, images.y
    if x.dim() != 4:
        raise ValueError(
            f"{where} x has shape {tuple(x.shape)}; expected samples x channels x height x width "
            "(for flat features: x[:, None, None, :])"
        )
    if x.dtype not in (torch.uint8, torch.float32):
        raise ValueError(f"{where} x is {x.dtype}; expected uint8 or float32")
    if y.dim() != 1 or len(y) != len(x):
        raise ValueError(
            f"{where} y has shape {tuple(y.shape)}; expected one class number for each of {len(x)} samples"
        )
    if not len(x):
        raise ValueError(f"{where} has no samples")
    if x.dtype == torch.float32 and not bool(torch.isfinite(x).all()):
        raise ValueError(f"{where} x holds values that are not finite")
    if int(y.min()) < 0:
        raise ValueError(f"{where} y holds the label {int(y.min())}; class numbers start at 0")


def _check(name: str, data: DataSet) -> None:
    for part, images in (("train", data.train), ("test", data.test)):
        if not (isinstance(images, Images) and isinstance(images.x, Tensor) and isinstance(images.y, Tensor)):
            raise ValueError(f"data {name!r}: {part} is {_describe(images)}; expected Images(x, y) of tensors")
        _check_part(name, part, images)
        check_labels(images.y.numpy(), len(data.classes), f"data {name!r}: {part}")
    if data.train.x.shape[1:] != data.test.x.shape[1:] or data.train.x.dtype != data.test.x.dtype:
        raise ValueError(
            f"data {name!r}: train is {data.train.x.dtype} {tuple(data.train.x.shape[1:])}, "
            f"test is {data.test.x.dtype} {tuple(data.test.x.shape[1:])}; they must be alike"
        )
    channels = data.train.x.shape[1]
    if len(data.mean) != channels or len(data.std) != channels or not all(value > 0 for value in data.std):
        raise ValueError(
            f"data {name!r}: mean {data.mean} and std {data.std}; expected {channels} of each, std above 0"
        )


def _fingerprint(data: DataSet) -> str:
    parts = [np.asarray(tensor) for images in (data.train, data.test) for tensor in (images.x, images.y)]
    return fingerprint(Arrays(parts[0], parts[1], parts[2], parts[3], data.classes))

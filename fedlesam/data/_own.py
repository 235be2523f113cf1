"""A user's own data set: what `module:callable` returns, checked."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlesam.core.batches import check_client
from fedlesam.core.names import imported
from fedlesam.core.task import is_pair
from fedlesam.core.tree import leaves, named_tensors, tree_map
from fedlesam.data._files import Arrays, check_labels, numbered_classes
from fedlesam.data.cache import fingerprint, statistics
from fedlesam.data.dataset import DataSet, Images


def load_own(name: str) -> DataSet:
    """Call `module:callable` without arguments and check what it returns: a DataSet, or (train, test).

    Both are a pair of tensors (x, y), or both another tree of tensors, as a client of a Federation may be.

    Args:
        name: `module:callable`.
    """
    make = imported("data", name)
    if not callable(make):
        raise ValueError(f"data {name!r}: is a {type(make).__name__}, not a callable")
    made = make()
    data = made if isinstance(made, DataSet) else _from_tensors(name, made)
    _check(name, data)
    if data.fingerprint:
        return data
    x, y, u, v = (np.asarray(tensor) for images in (data.train, data.test) for tensor in (images.x, images.y))
    found = fingerprint(Arrays(x, y, u, v, data.classes))
    if data.train.whole is not None:
        total = hashlib.sha256(found.encode())
        for leaf in (*leaves(data.train.whole), *leaves(data.test.whole)):
            total.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode() + leaf.contiguous().numpy().tobytes())
        found = total.hexdigest()
    return replace(data, fingerprint=found)


def _from_tensors(name: str, made: Any) -> DataSet:
    if is_pair(made) and all(_is_tree(part) for part in made):
        train, test = (
            _whole(f"data {name!r}: {what}", part) for what, part in zip(("train", "test"), made, strict=True)
        )
        return DataSet(name, train, test, _classes(train.y, f"data {name!r}: train"), (), ())
    if not (is_pair(made) and all(is_pair(part) for part in made)):
        raise ValueError(
            f"data {name!r}: returned {_describe(made)}; expected a DataSet or "
            "((train_x, train_y), (test_x, test_y)) of tensors, or (train, test) of dicts or nested tuples of tensors"
        )
    parts = []
    for part, (x, y) in zip(("train", "test"), made, strict=True):
        for what, value in (("x", x), ("y", y)):
            if not isinstance(value, Tensor):
                raise ValueError(f"data {name!r}: {part} {what} is {_describe(value)}; expected a tensor")
        if y.is_complex():
            raise ValueError(f"data {name!r}: {part} y is {y.dtype}; expected class numbers, or real targets")
        x, y = x.detach().cpu(), y.detach().cpu()
        x = x.float() if x.is_floating_point() or (x.dim() == 4 and x.dtype != torch.uint8) else x
        parts.append(Images(x, y.float() if y.is_floating_point() else y.long()))
        _check_part(f"data {name!r}: {part}", parts[-1])
    train, test = parts
    classes = _classes(train.y, f"data {name!r}: train")
    if not classes or train.x.dim() != 4:
        return DataSet(name, train, test, classes, (), ())
    if train.x.dtype == torch.uint8:
        return DataSet(name, train, test, classes, *statistics(train.x.numpy()))
    channels = train.x.shape[1]
    return DataSet(name, train, test, classes, (0.0,) * channels, (1.0,) * channels, scale=1.0)


def _classes(y: Tensor, where: str) -> tuple[str, ...]:
    """Of class numbers, one for each sample; none of other targets."""
    if y.is_floating_point() or y.dim() != 1:
        return ()
    return numbered_classes(int(y.max()), where)


def _is_tree(part: Any) -> bool:
    """Whether it is made of tensors, and no pair of two."""
    found = leaves(part) if isinstance(part, tuple | list | Mapping) else []
    return bool(found) and all(isinstance(leaf, Tensor) for leaf in found) and not _is_plain(part)


def _is_plain(part: Any) -> bool:
    return is_pair(part) and all(isinstance(value, Tensor) for value in part)


def _whole(where: str, part: Any) -> Images:
    """Samples in the form they have; real numbers in single precision."""
    tree = tree_map(lambda t: t.detach().cpu().float() if t.is_floating_point() else t.detach().cpu(), part)
    if isinstance(tree, list):
        tree = tuple(tree)
    check_client(tree, where)
    for path, leaf in named_tensors(tree):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise ValueError(f"{where} {path} holds values that are not finite")
    targets = tree["labels"] if isinstance(tree, Mapping) and "labels" in tree else None
    if is_pair(tree) and isinstance(tree[1], Tensor):
        targets = tree[1]
    first = leaves(tree)[0]
    return Images(first, torch.zeros(len(first)) if targets is None else targets, tree)


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:4])})"
    return f"a {type(value).__name__}"


def _check_part(where: str, images: Images) -> None:
    x, y = images.x, images.y
    if not x.dim() or not y.dim() or len(x) != len(y):
        shapes = f"{where} x has shape {tuple(x.shape)} and y {tuple(y.shape)}"
        raise ValueError(f"{shapes}; expected a row of both for each sample")
    if not len(x):
        raise ValueError(f"{where} has no samples")
    for what, values in (("x", x), ("y", y)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise ValueError(f"{where} {what} holds values that are not finite")
    if not y.is_floating_point() and y.dim() == 1 and images.whole is None and int(y.min()) < 0:
        raise ValueError(f"{where} y holds the label {int(y.min())}; class numbers start at 0")


def _check(name: str, data: DataSet) -> None:
    for part, images in (("train", data.train), ("test", data.test)):
        where = f"data {name!r}: {part}"
        if not (isinstance(images, Images) and isinstance(images.x, Tensor) and isinstance(images.y, Tensor)):
            raise ValueError(f"{where} is {_describe(images)}; expected Images(x, y) of tensors")
        _check_part(where, images)
        if data.classes:
            check_labels(images.y.numpy(), len(data.classes), where)
    train, test = (
        ", ".join(f"{what} {t.dtype} {tuple(t.shape[1:])}" for what, t in named_tensors(part.samples))
        for part in (data.train, data.test)
    )
    if train != test:
        raise ValueError(f"data {name!r}: train is {train}, test is {test}; they must be alike")
    mean, std, channels = data.mean, data.std, data.train.x.shape[1] if data.mean else 0
    if len(mean) != channels or len(std) != channels or not all(value > 0 for value in std):
        raise ValueError(f"data {name!r}: mean {mean} and std {std}; expected {channels} of each, std above 0")

"""How each kind of data set becomes a DataSet: embedded, with domains, a user's own, and found in files."""

import hashlib
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlesam.core.names import imported, unknown
from fedlesam.data._files import Arrays, Source, check_labels
from fedlesam.data._pictures import load_pictures
from fedlesam.data.augment import flip, flip_and_crop
from fedlesam.data.cache import fingerprint, prepare, statistics
from fedlesam.data.catalogue import NAMES, OFFICIAL, parse_domains
from fedlesam.data.dataset import DataSet, Domains, Images
from fedlesam.data.formats import domains, find, folders

DIGITS = 1437
"""Training samples of the digits: four fifths, by one fixed shuffle that is the same for every seed."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""What pretrained networks expect."""


def load_digits() -> DataSet:
    """The embedded data set: 1,797 handwritten digits, 8 x 8 pixels of 0 to 16.

    The test part of the UCI Optical Recognition of Handwritten Digits data set (E. Alpaydin, C. Kaynak, 1998, CC BY
    4.0), as scikit-learn distributes it.
    """
    with resources.files("fedlesam.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        x = torch.from_numpy(arrays["images"]).unsqueeze(1)
        y = torch.from_numpy(arrays["labels"].astype(np.int64))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = (Images(x[part], y[part]) for part in (order[:DIGITS], order[DIGITS:]))
    classes = tuple("0123456789")
    return DataSet("digits", train, test, classes, (0.305,), (0.376,), scale=16.0, fingerprint="digits-1797")


def source_of(name: str, data_dir: Path | None) -> Source:
    """Where a named or folder data set lies; a ValueError if it is not there or the name is not known."""
    if name.startswith("folder:"):
        return folders.source(Path(name.removeprefix("folder:")).expanduser())
    if name not in OFFICIAL:
        raise unknown("data", name, NAMES)
    return find.find(OFFICIAL[name], data_dir)[0]


def from_source(name: str, source: Source) -> DataSet:
    prepared = prepare(source)
    known = OFFICIAL.get(name)
    arrays, facts = prepared.arrays, known or prepared
    x, y, *test = (torch.from_numpy(np.require(array, requirements="W")) for array in arrays.named().values())
    data = DataSet(name, Images(x, y), Images(*test), arrays.classes, facts.mean, facts.std)
    augment = flip_and_crop if known and known.flip_and_crop else None
    return replace(data, augment=augment, fingerprint=prepared.fingerprint)


def load_domains(name: str, data_dir: Path | None = None, threads: int | None = None) -> DataSet:
    """All images as training images, each with its domain; there is no test set until a split leaves a domain out."""
    request = parse_domains(name)
    return from_listed(name, domains.find(request, data_dir), request.size, threads)


def from_listed(name: str, listed: domains.Listed, size: int, threads: int | None = None) -> DataSet:
    pictures = load_pictures(listed.root, listed.files, size, threads)
    kept = np.delete(np.arange(len(listed.files)), list(pictures.skipped))
    label, domain = listed.label[kept], listed.domain[kept]
    test = listed.test[kept] if listed.test is not None else None
    total = hashlib.sha256(json.dumps([listed.domains, listed.classes, pictures.checksum]).encode())
    for array in (label, domain, test):
        total.update(b"" if array is None else array.tobytes())
    x, y = torch.from_numpy(pictures.pixels), torch.from_numpy(label)
    data = DataSet(name, Images(x, y), Images(x[:0], y[:0]), listed.classes, IMAGENET_MEAN, IMAGENET_STD, augment=flip)
    return replace(data, fingerprint=total.hexdigest(), domains=Domains(listed.domains, domain, test))


def load_own(name: str) -> DataSet:
    """Call `module:callable` without arguments and check what it returns: a DataSet, or ((x, y), (x, y))."""
    make = imported("data", name)
    if not callable(make):
        raise ValueError(f"data {name!r}: is a {type(make).__name__}, not a callable")
    made = make()
    data = made if isinstance(made, DataSet) else _from_tensors(name, made)
    _check(name, data)
    if data.fingerprint:
        return data
    x, y, u, v = (np.asarray(tensor) for images in (data.train, data.test) for tensor in (images.x, images.y))
    return replace(data, fingerprint=fingerprint(Arrays(x, y, u, v, data.classes)))


def _from_tensors(name: str, made: Any) -> DataSet:
    def is_pair(value: Any) -> bool:
        return isinstance(value, tuple | list) and len(value) == 2

    if not (is_pair(made) and all(is_pair(part) for part in made)):
        raise ValueError(
            f"data {name!r}: returned {_describe(made)}; expected a DataSet or "
            "((train_x, train_y), (test_x, test_y)) of tensors"
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
    if train.y.is_floating_point() or train.y.dim() != 1:
        return DataSet(name, train, test, (), (), ())
    classes = tuple(str(i) for i in range(int(train.y.max()) + 1))
    if train.x.dim() != 4:
        return DataSet(name, train, test, classes, (), ())
    if train.x.dtype == torch.uint8:
        return DataSet(name, train, test, classes, *statistics(train.x.numpy()))
    channels = train.x.shape[1]
    return DataSet(name, train, test, classes, (0.0,) * channels, (1.0,) * channels, scale=1.0)


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
    if not y.is_floating_point() and y.dim() == 1 and int(y.min()) < 0:
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
        ", ".join(f"{what} {t.dtype} {tuple(t.shape[1:])}" for what, t in (("x", part.x), ("y", part.y)))
        for part in (data.train, data.test)
    )
    if train != test:
        raise ValueError(f"data {name!r}: train is {train}, test is {test}; they must be alike")
    mean, std, channels = data.mean, data.std, data.train.x.shape[1] if data.mean else 0
    if len(mean) != channels or len(std) != channels or not all(value > 0 for value in std):
        raise ValueError(f"data {name!r}: mean {mean} and std {std}; expected {channels} of each, std above 0")

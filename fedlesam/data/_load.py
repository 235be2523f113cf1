"""How each kind of data set becomes a DataSet: embedded, with domains, a user's own, and found in files."""

import hashlib
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from fedlesam.core.names import unknown
from fedlesam.data._files import Source
from fedlesam.data._pictures import load_pictures
from fedlesam.data.augment import flip, flip_and_crop
from fedlesam.data.cache import prepare
from fedlesam.data.catalogue import NAMES, OFFICIAL, is_files, parse_domains, parse_files
from fedlesam.data.dataset import DataSet, Domains, Images, Owners
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
    if is_files(name):
        return find.find_files(parse_files(name), data_dir)
    if name not in OFFICIAL:
        raise unknown("data", name, NAMES)
    return find.find(OFFICIAL[name], data_dir)[0]


def from_source(name: str, source: Source) -> DataSet:
    prepared = prepare(source)
    known = OFFICIAL.get(name)
    arrays, facts = prepared.arrays, known or prepared
    named = arrays.named()
    owner, test_owner = (named.pop(key, None) for key in ("train_owner", "test_owner"))
    x, y, *test = (torch.from_numpy(np.require(array, requirements="W")) for array in named.values())
    data = DataSet(name, Images(x, y), Images(*test), arrays.classes, facts.mean, facts.std)
    augment = flip_and_crop if known and known.flip_and_crop else None
    owners = None if owner is None else Owners(arrays.owners, owner, test_owner)
    data = replace(data, owners=owners, vocabulary=arrays.vocabulary)
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

"""A data set of several domains, of which a split leaves one out for the test."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from fedlesam.data.augment import flip
from fedlesam.data.dataset import DataSet, Domains, Images
from fedlesam.data.domain_sets import parse
from fedlesam.data.formats.domains import Listed, find
from fedlesam.data.pictures import load_pictures

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""What pretrained networks expect."""


def load_domains(name: str, data_dir: Path | None = None, processes: int | None = None) -> DataSet:
    """All images as training images, each with its domain; there is no test set until a split leaves a domain out."""
    request = parse(name)
    return from_listed(name, find(request, data_dir), request.size, processes)


def from_listed(name: str, listed: Listed, size: int, processes: int | None = None) -> DataSet:
    pictures = load_pictures(listed.root, listed.files, size, processes)
    kept = np.delete(np.arange(len(listed.files)), list(pictures.skipped))
    label, domain = listed.label[kept], listed.domain[kept]
    test = listed.test[kept] if listed.test is not None else None
    total = hashlib.sha256(json.dumps([listed.domains, listed.classes, pictures.checksum]).encode())
    for array in (label, domain, test):
        total.update(b"" if array is None else array.tobytes())
    everything = Images(torch.from_numpy(pictures.pixels), torch.from_numpy(label))
    return DataSet(
        name=name,
        train=everything,
        test=Images(everything.x[:0], everything.y[:0]),
        classes=listed.classes,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augment=flip,
        fingerprint=total.hexdigest(),
        domains=Domains(listed.domains, domain, test),
    )

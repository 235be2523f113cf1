"""Frozen features as data: a pretrained network without its head sees every image once, and federations train heads.

What the network computed is kept in the cache in blocks, so that an interrupted call resumes where it stopped, and
another number of components takes seconds. The result is a file for `--data features:FILE`.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlesam.core import disk
from fedlesam.core.checks import check_count
from fedlesam.core.names import unknown
from fedlesam.data import catalogue
from fedlesam.data._pictures import SECONDS_BETWEEN_LINES
from fedlesam.data.augment import other_view
from fedlesam.data.cache import entry_folder
from fedlesam.data.dataset import DataSet, Domains, Images
from fedlesam.models.catalogue import make_model

log = logging.getLogger(__name__)

VERSION = 1
"""Part of every key; to be raised when the computation changes."""
BLOCK = 500
"""Images of a file in the cache."""
BATCH = 32
"""Images of a forward pass; small enough for a processor's cache."""


@dataclass(frozen=True)
class Trunk:
    """A network whose features can be taken."""

    head: str
    """The name of the module that is left out."""
    mean: float
    """What its weights were trained with, for x / 255."""
    std: float
    """The standard deviation, likewise."""


TRUNKS = {"efficientnet-lite0": Trunk("_fc", 127 / 255, 128 / 255), "vit-b32": Trunk("head", 0.5, 0.5)}
"""By the first word of `--trunk`."""


@dataclass(frozen=True)
class Request:
    """Which features.

    Attributes:
        name: A data set, as for `load`.
        trunk: A network of `TRUNKS`, with options as for `--model`.
        size: Pixels of a side to which images are resized.
        mirror: Whether the mirror image's features are there too, as a second view.
        pca: How many principal components of the training samples are kept; None keeps the features as they are.
    """

    name: str
    trunk: str = "efficientnet-lite0"
    size: int = 96
    mirror: bool = False
    pca: int | None = None

    @property
    def views(self) -> tuple[bool, ...]:
        """Whether each view is mirrored."""
        return (False, True) if self.mirror else (False,)

    @property
    def file(self) -> str:
        """The default name of the file."""
        parts = [self.name, self.trunk, self.size, "mirror" * self.mirror, f"pca{self.pca}" if self.pca else ""]
        text = "-".join(str(part) for part in parts if part)
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text) + ".safetensors"


def compute(request: Request, out: Path | None = None, data_dir: Path | None = None) -> Path:
    """Compute features, or what of them is not in the cache, and write them as a file.

    Args:
        request: Which ones.
        out: The file. Default: named after the request, in the folder of the data.
        data_dir: As for `load`.

    Returns:
        The file.

    Raises:
        ValueError: The data or the trunk cannot be had, or there are fewer features than components.
    """
    check_count("features", "size", request.size, at_least=8)
    out = out or (data_dir or catalogue.DEFAULT_DIR) / request.file
    disk.make_folder(out.parent)
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"{out.parent}: the features cannot be written there; give another place with --out FILE")
    data = catalogue.load(request.name, data_dir)
    model, known = _trunk(request.trunk)
    source = f"{VERSION}|{data.fingerprint}|{_digest(model.state_dict())}|{request.size}"
    train = _views(request, data, "train", model, known, source)
    test = _views(request, data, "test", model, known, source) if len(data.test) else train[:0]
    tensors = {"train_y": data.train.y.contiguous(), "test_y": data.test.y.contiguous()}
    if request.pca is not None:
        tensors["components"] = _components(train.flatten(0, 1), request.pca)
        train, test = train @ tensors["components"], test @ tensors["components"]
    tensors |= {"center": train.mean((0, 1)), "scale": train.std((0, 1)).square().mean().sqrt()}
    for name, part in (("train_x", train), ("test_x", test)):
        tensors[name] = ((part - tensors["center"]) / tensors["scale"]).contiguous()
    about = {"request": vars(request), "data": data.fingerprint, "source": source, "classes": data.classes}
    if data.domains is not None:
        tensors["domain"] = torch.from_numpy(np.ascontiguousarray(data.domains.of))
        about["domains"] = data.domains.names
        if data.domains.test is not None:
            tensors["listed"] = torch.from_numpy(np.ascontiguousarray(data.domains.test))
    with disk.replacing(out) as beside:
        save_file(tensors, beside, {"fedlesam": json.dumps(about)})
    return out


def read(path: Path) -> DataSet:
    """The data set in a file of features: samples of shape 1 x views x features; training swaps the views at random.

    Args:
        path: What `compute` wrote.

    Raises:
        ValueError: It cannot be read, or is another file.
    """
    where = f"data features:{path}"
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["fedlesam"])
        tensors = load_file(path)
        train, test = (Images(tensors[f"{part}_x"].unsqueeze(1), tensors[f"{part}_y"]) for part in ("train", "test"))
        classes = tuple(about["classes"])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{where}: cannot be read ({error}); `fedlesam data features` writes one") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: is not a file of `fedlesam data features`") from error
    data = DataSet(f"features:{path}", train, test, classes, (0.0,), (1.0,), scale=1.0, fingerprint=_digest(tensors))
    if "domain" in tensors:
        listed = tensors["listed"].numpy() if "listed" in tensors else None
        data = replace(data, domains=Domains(tuple(about["domains"]), tensors["domain"].numpy(), listed))
    return replace(data, augment=other_view if train.x.shape[2] > 1 else None)


def _trunk(spec: str) -> tuple[nn.Module, Trunk]:
    known = TRUNKS.get(spec.partition(":")[0])
    if known is None:
        raise unknown("trunk", spec.partition(":")[0], TRUNKS)
    model = make_model(spec, (3, 224, 224), 1, seed=0)
    setattr(model, known.head, nn.Identity())
    return model.eval().to(memory_format=torch.channels_last), known  # type: ignore[call-overload]


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().numpy().data.cast("B") if tensor.numel() else b"")
    return total.hexdigest()


def _views(request: Request, data: DataSet, part: str, model: nn.Module, known: Trunk, source: str) -> Tensor:
    """samples x views x features."""
    x = (data.train if part == "train" else data.test).x
    if data.shape[0] not in (1, 3):
        raise ValueError(f"data {request.name}: a trunk takes grey or colour pictures, it has {data.shape[0]} channels")
    views = [
        _outputs(x, data.scale, model, known, request.size, f"{source}-{part}", mirror) for mirror in request.views
    ]
    return torch.stack(views, 1)


def _outputs(x: Tensor, most: float, model: nn.Module, known: Trunk, size: int, key: str, mirror: bool) -> Tensor:
    """samples x features, block by block, from the cache where they are there."""
    folder = entry_folder("features", f"{key}|{mirror}")
    logged, unit, blocks = time.monotonic(), key.rpartition("-")[2] + " mirrored" * mirror, []
    for start in range(0, len(x), BLOCK):
        path = folder / f"{start}.safetensors"
        try:
            block = load_file(path)["features"]
        except (OSError, SafetensorError, KeyError):
            block = torch.cat([*_forward(x[start : start + BLOCK].float() / most, model, known, size, mirror)]).half()
            with disk.replacing(path) as beside:
                save_file({"features": block}, beside)
        blocks.append(block.float())
        progress = {"done": start + len(block), "total": len(x), "unit": unit}
        if time.monotonic() - logged > SECONDS_BETWEEN_LINES or progress["done"] == len(x):
            logged = time.monotonic()
            log.info("features of %(done)s of %(total)s images, %(unit)s", progress, extra=progress)
    return torch.cat(blocks)


@torch.inference_mode()
def _forward(x: Tensor, model: nn.Module, known: Trunk, size: int, mirror: bool) -> Iterator[Tensor]:
    """The outputs, batch by batch, of samples from 0 to 1; grey ones become colour."""
    for start in range(0, len(x), BATCH):
        pictures = x[start : start + BATCH].expand(-1, 3, -1, -1)
        pictures = F.interpolate(pictures, size=(size, size), mode="bilinear", antialias=True)
        pictures = (pictures.flip(3) if mirror else pictures).sub(known.mean).div_(known.std)
        yield model(pictures.contiguous(memory_format=torch.channels_last)).flatten(1)


def _components(rows: Tensor, count: int) -> Tensor:
    """The first principal components; the sign of each is free, its sum is made positive."""
    if not 1 <= count <= min(rows.shape):
        raise ValueError(f"--pca {count}: there are {rows.shape[1]} features of {rows.shape[0]} training views")
    center = rows.mean(0)
    covariance = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for start in range(0, len(rows), 10_000):
        part = (rows[start : start + 10_000] - center).double()
        covariance += part.T @ part
    vectors = torch.linalg.eigh(covariance)[1].flip(1)[:, :count]
    return torch.where(vectors.sum(0) < 0, -vectors, vectors).float().contiguous()

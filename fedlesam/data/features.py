"""Frozen features as data: a pretrained network without its head sees every image once, and federations train heads.

What the network computed is kept in the cache in blocks, so that an interrupted call goes on where it stopped, and
another number of components takes seconds. The result is a file for `--data features:FILE`.
"""

import hashlib
import json
import logging
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
    data = catalogue.load(request.name, data_dir)
    model, known = _trunk(request.trunk)
    source = _key(request, data, model)
    train, test = (_views(request, part.x, model, known, f"{source}-{name}", name) for name, part in _parts(data))
    center = scale = components = None
    if request.pca is not None:
        train, test, components = _project(train, test, request.pca)
    center, scale = train.mean((0, 1)), float(train.std())
    tensors = {
        "train_x": ((train - center) / scale).contiguous(),
        "train_y": data.train.y.contiguous(),
        "test_x": ((test - center) / scale).contiguous(),
        "test_y": data.test.y.contiguous(),
        "center": center,
        "scale": torch.tensor(scale),
    }
    if components is not None:
        tensors["components"] = components
    about = {"request": vars(request), "source": source, "classes": data.classes, "data": data.fingerprint}
    if data.domains is not None:
        tensors["domain"] = torch.from_numpy(np.ascontiguousarray(data.domains.of))
        about["domains"] = data.domains.names
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
        data = replace(data, domains=Domains(tuple(about["domains"]), tensors["domain"].numpy()))
    return replace(data, augment=other_view if train.x.shape[2] > 1 else None)


def _parts(data: DataSet) -> list[tuple[str, Images]]:
    return [("train", data.train), ("test", data.test)]


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


def _key(request: Request, data: DataSet, model: nn.Module) -> str:
    """Of what decides the trunk's outputs: the samples, the weights, the size."""
    return f"{VERSION}|{data.fingerprint}|{_digest(model.state_dict())}|{request.size}"


def _views(request: Request, x: Tensor, model: nn.Module, known: Trunk, key: str, part: str) -> Tensor:
    """samples x views x features."""
    views = [_outputs(x, model, known, request.size, key, part, mirror) for mirror in (False, True)[: 1 + request.mirror]]
    return torch.stack(views, 1)


def _outputs(x: Tensor, model: nn.Module, known: Trunk, size: int, key: str, part: str, mirror: bool) -> Tensor:
    """Block by block, from the cache where they are there."""
    folder = entry_folder("features", f"{key}|{mirror}")
    logged, blocks = time.monotonic(), []
    for start in range(0, len(x), BLOCK):
        path = folder / f"{start}.safetensors"
        try:
            block = load_file(path)["features"]
        except (OSError, SafetensorError, KeyError):
            block = torch.cat([*_forward(x[start : start + BLOCK], model, known, size, mirror)]).half()
            with disk.replacing(path) as beside:
                save_file({"features": block}, beside)
        blocks.append(block.float())
        progress = {"done": start + len(block), "total": len(x), "unit": f"{part}{' mirrored' * mirror}"}
        if time.monotonic() - logged > SECONDS_BETWEEN_LINES or progress["done"] == len(x):
            logged = time.monotonic()
            log.info("features of %(done)s of %(total)s images, %(unit)s", progress, extra=progress)
    return torch.cat(blocks) if blocks else torch.empty(0, 0)


@torch.inference_mode()
def _forward(x: Tensor, model: nn.Module, known: Trunk, size: int, mirror: bool) -> Iterator[Tensor]:
    for batch in x.split(BATCH):
        pictures = F.interpolate(batch.float() / 255, size=(size, size), mode="bilinear", antialias=True)
        pictures = (pictures.flip(3) if mirror else pictures).sub_(known.mean).div_(known.std)
        yield model(pictures.contiguous(memory_format=torch.channels_last)).flatten(1)


def _project(train: Tensor, test: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Onto the principal components of the training samples, of all views."""
    rows = train.flatten(0, 1)
    if not 1 <= count <= min(rows.shape):
        raise ValueError(f"--pca {count}: there are {rows.shape[1]} features of {rows.shape[0]} training views")
    center = rows.mean(0)
    covariance = sum((part - center).double().T @ (part - center).double() for part in rows.split(10_000))
    vectors = torch.linalg.eigh(covariance)[1].flip(1)[:, :count]  # type: ignore[arg-type]
    vectors = (vectors * vectors.sum(0).sign()).float().contiguous()  # a sign is free; this one depends on the data only
    return *((part - center) @ vectors if len(part) else part.new_empty(0, part.shape[1], count) for part in (train, test)), vectors

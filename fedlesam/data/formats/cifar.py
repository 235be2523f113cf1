"""CIFAR-10 and CIFAR-100 as their authors publish them: pickled batches, or records of label bytes and pixels."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedlesam.data._files import (
    Arrays,
    Labels,
    Pixels,
    Source,
    check_all_classes,
    check_labels,
    read_bytes,
    tar_members,
)
from fedlesam.data.catalogue import Official, fetch_hint
from fedlesam.data.formats._pickle import safe_loads

Part = tuple[Pixels, Labels]
ReadBatch = Callable[[bytes, str, Official], Part]


def _batches(known: Official, suffix: str) -> tuple[tuple[str, ...], str]:
    """The training files and the test file."""
    if known.name == "cifar100":
        return (f"train{suffix}",), f"test{suffix}"
    return tuple(f"data_batch_{i}{suffix}" for i in range(1, 6)), f"test_batch{suffix}"


def _pickled(data: bytes, where: str, known: Official) -> Part:
    batch = safe_loads(data, where)
    key = "fine_labels" if known.name == "cifar100" else "labels"
    for needed in ("data", key):
        if needed not in batch:
            raise ValueError(f"{where}: holds no {needed!r} (only {sorted(batch)}); this is not a {known.name} batch")
    x, labels = batch["data"], _labels(batch[key])
    size = int(np.prod(known.shape))
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != size:
        shape = getattr(x, "shape", type(x).__name__)
        raise ValueError(f"{where}: 'data' is {shape}, expected bytes of shape (images, {size}); damaged, get it again")
    if labels is None or len(labels) != len(x):
        raise ValueError(f"{where}: {key!r} is not a list of {len(x)} whole numbers; damaged, get it again")
    return x.reshape(-1, *known.shape), labels


def _labels(values: Any) -> Labels | None:
    if isinstance(values, list) and not all(type(v) is int and abs(v) < 2**31 for v in values):
        return None
    if not isinstance(values, list | np.ndarray):
        return None
    labels = np.asarray(values, dtype=np.int64)
    return labels if labels.ndim == 1 else None


def _records(data: bytes, where: str, known: Official) -> Part:
    """A record is one label byte (CIFAR-100: the coarse, then the fine one) and the pixels, channel by channel."""
    heads = 2 if known.name == "cifar100" else 1
    size = heads + int(np.prod(known.shape))
    if len(data) % size:
        raise ValueError(f"{where}: {len(data):,} bytes are no multiple of {size} per image; truncated, get it again")
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    return rows[:, heads:].reshape(-1, *known.shape), rows[:, heads - 1].astype(np.int64)


def _decode(known: Official, contents: Mapping[str, bytes], where: Path, suffix: str, read: ReadBatch) -> Arrays:
    train_names, test_name = _batches(known, suffix)
    absent = [name for name in (*train_names, test_name) if name not in contents]
    if absent:
        raise ValueError(f"{where}: holds no {', '.join(absent)}; {fetch_hint(known.name, where.parent)}")
    parts = {}
    for name in (*train_names, test_name):
        place = f"{where}, {name}"
        x, y = parts[name] = read(contents[name], place, known)
        if not len(x):
            raise ValueError(f"{place}: holds no images; truncated, get it again")
        check_labels(y, len(known.classes), place)
    sizes = {name: len(parts[name][1]) for name in train_names}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{where}: training batches of different sizes {sizes}; one is truncated, get it again")
    arrays = Arrays(
        np.concatenate([parts[name][0] for name in train_names]),
        np.concatenate([parts[name][1] for name in train_names]),
        np.ascontiguousarray(parts[test_name][0]),
        parts[test_name][1],
        known.classes,
    )
    return check_all_classes(arrays, str(where))


def _from_archive(known: Official, path: Path, suffix: str, read: ReadBatch) -> Arrays:
    train, test = _batches(known, suffix)
    return _decode(known, tar_members(path, (*train, test)), path, suffix, read)


def _from_folder(known: Official, folder: Path, suffix: str, read: ReadBatch) -> Arrays:
    train, test = _batches(known, suffix)
    return _decode(known, {name: read_bytes(folder / name) for name in (*train, test)}, folder, suffix, read)


def find(known: Official, root: Path) -> list[Source]:
    """The four official forms in `root`, the preferred first; one with missing files says so."""
    count = known.name.removeprefix("cifar")
    found = []
    for version, folder, suffix, read in (
        ("python", f"cifar-{count}-batches-py" if count == "10" else f"cifar-{count}-python", "", _pickled),
        ("binary", f"cifar-{count}-batches-bin" if count == "10" else f"cifar-{count}-binary", ".bin", _records),
    ):
        for path in (root / f"cifar-{count}-{version}.tar.gz", root / f"cifar-{count}-{version}.tar"):
            if path.is_file():
                decode = partial(_from_archive, known, path, suffix, read)
                found.append(Source(known.name, f"{version} archive", root, (path,), decode))
        if (root / folder).is_dir():
            train, test = _batches(known, suffix)
            files = tuple(root / folder / name for name in (*train, test))
            missing = tuple(file for file in files if not file.is_file())
            decode = partial(_from_folder, known, root / folder, suffix, read)
            found.append(Source(known.name, f"{version} archive, extracted", root, files, decode, missing))
    return found

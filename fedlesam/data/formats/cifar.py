"""CIFAR-10 and CIFAR-100 as their authors publish them: records of label bytes and pixels, or pickled batches."""

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


def _read(known: Official, path: Path, suffix: str, read: ReadBatch) -> Arrays:
    """From the archive or the folder `path`."""
    train, test = _batches(known, suffix)
    names = (*train, test)
    contents = {name: read_bytes(path / name) for name in names} if path.is_dir() else tar_members(path, names)
    return _decode(known, contents, path, suffix, read)


def find(known: Official, root: Path) -> list[Source]:
    """The official forms in `root`, the pickle-free first; one with missing files says so."""
    base = f"cifar-{known.name.removeprefix('cifar')}"
    found = []
    for version, short, suffix, read in (("binary", "bin", ".bin", _records), ("python", "py", "", _pickled)):
        for path in (root / f"{base}-{version}.tar.gz", root / f"{base}-{version}.tar"):
            if path.is_file():
                decode = partial(_read, known, path, suffix, read)
                found.append(Source(known.name, f"{version} archive", root, (path,), decode))
        folder = root / (f"{base}-batches-{short}" if known.name == "cifar10" else f"{base}-{version}")
        if folder.is_dir():
            train, test = _batches(known, suffix)
            files = tuple(folder / name for name in (*train, test))
            missing = tuple(file for file in files if not file.is_file())
            decode = partial(_read, known, folder, suffix, read)
            found.append(Source(known.name, f"{version} archive, extracted", root, files, decode, missing))
    return found

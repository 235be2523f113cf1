"""CIFAR-10 and CIFAR-100 as their authors publish them: records of label bytes and pixels, or pickled batches."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedlesam.data._files import Arrays, Labels, Part, Source, check_all_classes, check_labels, read_bytes, tar_members
from fedlesam.data.catalogue import Official, fetch_hint
from fedlesam.data.formats._pickle import safe_loads

ReadBatch = Callable[[bytes, str, Official], Part]


def _names(known: Official, suffix: str) -> list[str]:
    """The training files, and last the test file."""
    stems = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if known.name == "cifar10" else ["train", "test"]
    return [f"{stem}{suffix}" for stem in stems]


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
    if isinstance(values, list) and all(type(v) is int and abs(v) < 2**31 for v in values):
        return np.asarray(values, dtype=np.int64)
    return values.astype(np.int64) if isinstance(values, np.ndarray) and values.ndim == 1 else None


def _records(data: bytes, where: str, known: Official) -> Part:
    """A record is one label byte (CIFAR-100: the coarse, then the fine one) and the pixels, channel by channel."""
    heads = 2 if known.name == "cifar100" else 1
    size = heads + int(np.prod(known.shape))
    if len(data) % size:
        raise ValueError(
            f"{where}: {len(data):,} bytes are not a multiple of {size} per image; truncated, get it again"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    return rows[:, heads:].reshape(-1, *known.shape), rows[:, heads - 1].astype(np.int64)


def _decode(known: Official, path: Path, suffix: str, read: ReadBatch) -> Arrays:
    """From the archive or the folder `path`."""
    names = _names(known, suffix)
    contents = {name: read_bytes(path / name) for name in names} if path.is_dir() else tar_members(path, names)
    absent = [name for name in names if name not in contents]
    if absent:
        raise ValueError(f"{path}: holds no {', '.join(absent)}; {fetch_hint(known.name, path.parent)}")
    parts = {}
    for name in names:
        place = f"{path}, {name}"
        x, y = parts[name] = read(contents[name], place, known)
        if not len(x):
            raise ValueError(f"{place}: holds no images; truncated, get it again")
        check_labels(y, len(known.classes), place)
    test_x, test_y = parts.pop(names[-1])
    sizes = {name: len(y) for name, (_, y) in parts.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{path}: training batches of different sizes {sizes}; one is truncated, get it again")
    x, y = np.concatenate([x for x, _ in parts.values()]), np.concatenate([y for _, y in parts.values()])
    return check_all_classes(Arrays(x, y, np.ascontiguousarray(test_x), test_y, known.classes), str(path))


def find(known: Official, root: Path) -> list[Source]:
    """The official forms in `root`, the pickle-free first; one with missing files says so.

    Args:
        known: The data set.
        root: The folder that is searched.
    """
    base = f"cifar-{known.name.removeprefix('cifar')}"
    found = []
    for version, short, suffix, read in (("binary", "bin", ".bin", _records), ("python", "py", "", _pickled)):
        form = f"{version} archive"
        for path in (root / f"{base}-{version}.tar.gz", root / f"{base}-{version}.tar"):
            if path.is_file():
                found.append(Source(known.name, form, root, (path,), partial(_decode, known, path, suffix, read)))
        folder = root / (f"{base}-batches-{short}" if known.name == "cifar10" else f"{base}-{version}")
        if folder.is_dir():
            files = tuple(folder / name for name in _names(known, suffix))
            missing = tuple(file for file in files if not file.is_file())
            decode = partial(_decode, known, folder, suffix, read)
            found.append(Source(known.name, f"{form}, extracted", root, files, decode, missing))
    return found

"""Decoded arrays on disk, mapped into memory, so that data is decoded once and shared by all processes that read it.

An entry is a folder named by the hash of the source's contents. It is written under another name and renamed, so a
reader sees all of it or nothing. Its arrays are hashed again whenever it is opened: a damaged entry is never used.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs

from fedlesam.data._files import Arrays, Pixels, Source

log = logging.getLogger(__name__)

VERSION = 1
"""Part of every key; to be raised when a decoder changes what it returns."""
STALE = 24 * 3600
"""Seconds after which the leftovers of a killed process are deleted."""

_warned: set[str] = set()


class Damaged(Exception):
    """An entry is not what was written."""


@dataclass(frozen=True)
class Prepared:
    """A data set ready for use."""

    arrays: Arrays
    mean: tuple[float, ...]
    """Per channel over the training images, of x / 255."""
    std: tuple[float, ...]
    fingerprint: str
    """Of the samples and the classes, whatever form they were stored in."""
    source: str
    """Hash of the source's files."""
    cached: bool
    """Whether it came from the cache, not from the source."""


def cache_dir() -> Path:
    """The folder of the cache: $FEDLESAM_CACHE, or the user's cache folder."""
    return Path(os.environ.get("FEDLESAM_CACHE") or platformdirs.user_cache_dir("fedlesam")).expanduser()


def entry_folder(kind: str, key: str) -> Path:
    return cache_dir() / kind / hashlib.sha256(key.encode()).hexdigest()[:32]


def prepare(source: Source) -> Prepared:
    """The arrays of a source: from the cache, or decoded and stored there.

    Args:
        source: A data set that was found in files.

    Raises:
        ValueError: Its files are damaged, or change while they are read.
    """
    digest = source.digest()
    folder = entry_folder("data", f"{VERSION}|{source.kind}|{source.form}|{digest}")
    try:
        found = _open(folder, digest)
        if found is not None:
            return found
    except Damaged as problem:
        log.warning("the cached data in %s is damaged (%s); it is rebuilt from %s", folder, problem, source.root)
        discard(folder)
    arrays = source.decode()
    if source.digest() != digest:
        raise ValueError(f"{source.root}: its files changed while they were read; wait until they are complete")
    return _store(folder, Prepared(arrays, *statistics(arrays.train_x), fingerprint(arrays), digest, cached=False))


def fingerprint(arrays: Arrays) -> str:
    """Hash of the samples and the classes.

    Args:
        arrays: A data set.
    """
    total = hashlib.sha256(json.dumps(arrays.classes).encode())
    for name, array in arrays.named().items():
        total.update(f"{name}{array.dtype.str}{array.shape}".encode())
        total.update(np.ascontiguousarray(array).data.cast("B"))
    return total.hexdigest()


def statistics(x: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of x / 255, from exact counts; a constant channel has deviation 1.

    Args:
        x: samples x channels x height x width.
    """
    mean, std, values = [], [], np.arange(256) / 255
    for channel in range(x.shape[1]):
        blocks = (x[start : start + 1000, channel] for start in range(0, len(x), 1000))
        counts = sum(np.bincount(block.ravel(), minlength=256) for block in blocks)
        shares = counts / np.sum(counts)
        mean.append(float(shares @ values))
        std.append(float(np.sqrt(shares @ (values - mean[-1]) ** 2)) or 1.0)
    return tuple(mean), tuple(std)


def _open(folder: Path, digest: str) -> Prepared | None:
    """The entry, None if there is none; Damaged if it is not what was written."""
    entry = read_entry(folder)
    if entry is None:
        return None
    parts = {name: mapped_array(folder / f"{name}.bin", *described) for name, described in entry["arrays"].items()}
    arrays = Arrays(**parts, classes=tuple(entry["classes"]))
    if entry["source"] != digest or fingerprint(arrays) != entry["fingerprint"]:
        raise Damaged("its arrays do not match their checksum")
    return Prepared(arrays, tuple(entry["mean"]), tuple(entry["std"]), entry["fingerprint"], digest, cached=True)


def _store(folder: Path, fresh: Prepared) -> Prepared:
    """The same arrays, mapped; or as they are where the cache cannot be written."""
    beside = temporary(folder)
    arrays = fresh.arrays.named()
    entry = {name: getattr(fresh, name) for name in ("mean", "std", "fingerprint", "source")}
    entry |= {"arrays": {name: (a.dtype.str, a.shape) for name, a in arrays.items()}, "classes": fresh.arrays.classes}
    try:
        beside.mkdir(parents=True)
        sweep(folder.parent)
        for name, array in arrays.items():
            np.ascontiguousarray(array).tofile(beside / f"{name}.bin")
        write_entry(beside, entry)
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / "entry").exists():
                raise
        mapped = _open(folder, fresh.source)
        return fresh if mapped is None else replace(fresh, arrays=mapped.arrays)
    except OSError as error:
        warn_once(
            f"cannot write the cache {folder.parent} ({error.strerror or error}); data is kept in memory and decoded "
            "anew each time; set FEDLESAM_CACHE to a folder that can be written"
        )
    except Damaged as problem:
        warn_once(f"the cache {folder.parent} does not keep what is written to it ({problem}); data is kept in memory")
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return fresh


def read_entry(folder: Path) -> dict[str, Any] | None:
    """The description of an entry, None if there is none or it may not be read; Damaged if it is not as written."""
    try:
        check, _, text = (folder / "entry").read_text("utf-8").partition("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        warn_once(f"cannot read the cache {folder.parent} ({error.strerror}); data is kept in memory")
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(error) from error
    if hashlib.sha256(text.encode()).hexdigest() != check:
        raise Damaged("its description does not match its checksum")
    entry: dict[str, Any] = json.loads(text)
    return entry


def write_entry(folder: Path, entry: dict[str, Any]) -> None:
    text = json.dumps(entry)
    (folder / "entry").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", "utf-8")


def mapped_array(path: Path, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    """Copy on write: what a user changes in memory never reaches the file."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        if path.stat().st_size != size:
            raise Damaged(f"{path.name} has {path.stat().st_size:,} bytes instead of {size:,}")
        return np.memmap(path, dtype, mode="c", shape=tuple(shape))
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from error


def temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")


def discard(folder: Path) -> None:
    """Renamed first, so that no other process reads half of it."""
    aside = temporary(folder)
    with contextlib.suppress(OSError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Delete what killed processes left behind."""
    for path in parent.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path, ignore_errors=True)


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)

"""Decoded arrays on disk, mapped into memory, so that data is decoded once and shared by all processes that read it.

An entry is a folder named by the hash of the source's contents. It is written under another name and renamed, so a
reader sees all of it or nothing. Its arrays are hashed again whenever it is opened: a damaged entry is never used.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import platformdirs

from fedlesam.data._files import Arrays, Pixels, Source, files_digest

log = logging.getLogger(__name__)

VERSION = 1
"""Part of every key; to be raised when a decoder changes what it returns."""
STALE = 24 * 3600
"""Seconds after which the leftovers of a killed process are deleted."""

_warned: set[str] = set()

Decoded = dict[str, npt.NDArray[Any]]
Facts = dict[str, Any]
"""What an entry says of its arrays."""
IsWhole = Callable[[Decoded, Facts], bool]


class Damaged(Exception):
    """An entry is not what was written."""


@dataclass(frozen=True)
class Prepared:
    """A data set ready for use."""

    arrays: Arrays
    """Samples and labels, training and test."""
    mean: tuple[float, ...]
    """Per channel over the training images, of x / 255; of what is no picture there are none."""
    std: tuple[float, ...]
    """The standard deviation of each channel, likewise."""
    fingerprint: str
    """Of the samples and the classes, whatever form they were stored in."""
    cached: bool
    """Whether it came from the cache, not from the source."""

    @classmethod
    def of(cls, arrays: Decoded, facts: Facts, cached: bool) -> Self:
        """From the named arrays and what is known of them.

        Args:
            arrays: By their names in `Arrays`.
            facts: Mean, std, fingerprint and names.
            cached: Whether they came from the cache.
        """
        texts = {name: tuple(facts.get(name, ())) for name in ("classes", "owners", "vocabulary")}
        made = Arrays(**arrays, **texts)  # type: ignore[arg-type]
        return cls(made, tuple(facts["mean"]), tuple(facts["std"]), facts["fingerprint"], cached)


def cache_dir() -> Path:
    """The folder of the cache: $FEDLESAM_CACHE, or the user's cache folder."""
    return Path(os.environ.get("FEDLESAM_CACHE") or platformdirs.user_cache_dir("fedlesam")).expanduser()


def entry_folder(kind: str, key: str) -> Path:
    """Where an entry of the cache is.

    Args:
        kind: What it holds, e.g. `data`.
        key: All that its content depends on.
    """
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

    def is_whole(arrays: Decoded, facts: Facts) -> bool:
        return fingerprint(Prepared.of(arrays, facts, cached=True).arrays) == str(facts["fingerprint"])

    found = open_entry(folder, digest, is_whole)
    if found is not None:
        return Prepared.of(*found, cached=True)
    decoded = source.decode()
    check_unchanged(source.root, source.files, digest)
    mean, std = statistics(decoded.train_x) if decoded.train_x.dtype == np.uint8 else ((), ())
    known = {"classes": decoded.classes, **decoded.facts}
    facts = {"mean": mean, "std": std, "fingerprint": fingerprint(decoded), **known}
    arrays = decoded.named()
    try:
        with room(folder, sum(array.nbytes for array in arrays.values())) as beside:
            for name, array in arrays.items():
                np.ascontiguousarray(array).tofile(beside / f"{name}.bin")
            arrays = commit(beside, folder, arrays, {**facts, "source": digest})
    except (OSError, Damaged) as error:
        remedy = "set FEDLESAM_CACHE to a folder that can be written"
        warn_once(f"{cannot_write(folder, error)}; data is kept in memory and decoded anew each time; {remedy}")
    return Prepared.of(arrays, facts, cached=False)


def check_unchanged(root: Path, files: Iterable[Path], digest: str) -> None:
    """A ValueError if files have changed since their digest was taken.

    Args:
        root: The folder of the data set.
        files: All of its files.
        digest: Of the files, when reading began.
    """
    if files_digest(root, files) != digest:
        raise ValueError(f"{root}: its files changed while they were read; wait until they are complete")


def fingerprint(arrays: Arrays) -> str:
    """Hash of the samples and the classes.

    Args:
        arrays: A data set.
    """
    total = hashlib.sha256(json.dumps([arrays.classes, arrays.facts] if arrays.facts else arrays.classes).encode())
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


def open_entry(folder: Path, source: str, is_whole: IsWhole) -> tuple[Decoded, Facts] | None:
    """The arrays of an entry, mapped, and what is known of them; None if there is none. A damaged one is deleted.

    Args:
        folder: Of the entry.
        source: The digest of the files that it was made from.
        is_whole: Whether arrays match what is known of them.
    """
    try:
        if (facts := _read(folder)) is None:
            return None
        arrays = _mapped(folder, facts)
        if facts["source"] != source or not is_whole(arrays, facts):
            raise Damaged("its arrays do not match their checksum")
        return arrays, facts
    except Damaged as problem:
        log.warning("the cached data in %s is damaged (%s); it is rebuilt from its source", folder, problem)
        discard(folder)
        return None


@contextlib.contextmanager
def room(folder: Path, size: int) -> Iterator[Path]:
    """A folder for an entry's files, deleted at the end unless `commit` renamed it. OSError if there is no room.

    Args:
        folder: Where the entry will be.
        size: In bytes, of all its files.
    """
    beside = _temporary(folder)
    try:
        beside.mkdir(parents=True)
        _sweep(folder.parent)
        free = shutil.disk_usage(beside).free
        if size > 0.95 * free:
            raise OSError(f"needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def commit(beside: Path, folder: Path, arrays: Decoded, facts: Facts) -> Decoded:
    """Make an entry of the files in `beside`; the same arrays, mapped.

    Args:
        beside: The folder that `room` gave.
        folder: Where the entry will be.
        arrays: What the files hold.
        facts: What is known of the arrays; JSON.
    """
    entry = {**facts, "arrays": {name: (array.dtype.str, array.shape) for name, array in arrays.items()}}
    text = json.dumps(entry)
    (beside / "entry").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", "utf-8")
    try:
        beside.rename(folder)
    except OSError:  # another process was quicker
        if not (folder / "entry").exists():
            raise
    return _mapped(folder, entry)


def cannot_write(folder: Path, error: Exception) -> str:
    """What is wrong with the cache, for a warning.

    Args:
        folder: Of the entry.
        error: What writing raised.
    """
    return f"cannot write the cache {folder.parent} ({getattr(error, 'strerror', None) or error})"


def _read(folder: Path) -> Facts | None:
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
    entry: Facts = json.loads(text)
    return {"arrays": {"pixels": ("|u1", entry["shape"])}} | entry if "shape" in entry else entry  # earlier versions


def _mapped(folder: Path, facts: Facts) -> Decoded:
    """Copy on write: what a user changes in memory never reaches the file."""
    arrays: Decoded = {}
    for name, (dtype, shape) in facts["arrays"].items():
        path, size = folder / f"{name}.bin", math.prod(shape) * np.dtype(dtype).itemsize
        try:
            if path.stat().st_size != size:
                raise Damaged(f"{path.name} has {path.stat().st_size:,} bytes instead of {size:,}")
            arrays[name] = np.memmap(path, dtype, mode="c", shape=tuple(shape))
        except (OSError, ValueError) as error:  # ValueError: it became shorter after its size was read
            raise Damaged(f"{path.name}: {getattr(error, 'strerror', None) or error}") from error
    return arrays


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")


def discard(folder: Path) -> None:
    """Renamed first, so that no other process reads half of it.

    Args:
        folder: Of the entry.
    """
    aside = _temporary(folder)
    with contextlib.suppress(OSError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Delete what killed processes left behind."""
    for path in parent.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path, ignore_errors=True)


def warn_once(message: str) -> None:
    """Log a warning, but not twice in this process.

    Args:
        message: The warning.
    """
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)

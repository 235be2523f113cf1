"""Files of a data set: read, hashed and unpacked in memory, and the arrays that they decode to.

Nothing is extracted to disk, and every member of an archive is checked before any is used.
"""

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[Any]
"""Samples of any form: pixels, token numbers, numbers of a table."""
Labels = npt.NDArray[np.int64]
Part = tuple[Pixels, Labels]
"""The training or the test samples, or some of them."""

LIMIT = 2**30
"""Bytes of an unpacked archive; no known data set has more than a fifth of this."""
MEMBERS = 10_000
CLASSES = 1_000_000
"""More than any data set has; a larger label is an identifier or damaged, and would fill the memory with names."""
GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Arrays:
    """Raw samples of both parts: x is pictures (samples x channels x height x width), or rows; y the class numbers."""

    train_x: Values
    train_y: Labels
    test_x: Values
    test_y: Labels
    classes: tuple[str, ...]
    train_owner: Labels | None = None
    """The number of each sample's natural client."""
    test_owner: Labels | None = None
    """The same of test samples; -1 of nobody's."""
    owners: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    """What the token numbers of x stand for."""

    def named(self) -> dict[str, Values]:
        names = ("train_x", "train_y", "test_x", "test_y", "train_owner", "test_owner")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def facts(self) -> dict[str, tuple[str, ...]]:
        """The texts among the fields, where there are some beside the classes."""
        return {name: getattr(self, name) for name in ("owners", "vocabulary") if getattr(self, name)}


@dataclass(frozen=True)
class Source:
    """One form of one data set, found but not yet read."""

    kind: str
    """Whose rules decode it: the name of an official data set, or "folder"."""
    form: str
    """For people: "binary archive", "parquet", ..."""
    root: Path
    files: tuple[Path, ...]
    decode: Callable[[], Arrays]
    missing: tuple[Path, ...] = ()
    """Files that this form needs and that are not there: then it cannot be decoded."""

    def digest(self) -> str:
        """Of the names and the contents of all files. Always read, so that a changed file is never overlooked."""
        return files_digest(self.root, self.files)


def files_digest(root: Path, files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(root).as_posix()}\0{file_digest(path, 'sha256')}\n".encode())
    return total.hexdigest()


def file_digest(path: Path, algorithm: str) -> str:
    return hashlib.new(algorithm, read_bytes(path), usedforsecurity=False).hexdigest()


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = f"{error.strerror or error}; check that it exists and its permissions"
        raise ValueError(f"{path}: cannot be read: {reason}") from error


def plain_bytes(path: Path, limit: int = LIMIT) -> bytes:
    """The contents of a file, decompressed to the last byte if it is gzipped, so that its checksum is compared."""
    data = read_bytes(path)
    if not data.startswith(GZIP):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            plain = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: truncated or damaged ({error}); get it again") from error
    if len(plain) > limit:
        raise ValueError(f"{path}: unpacks to more than {limit:,} bytes; this is not the official file")
    return plain


def tar_members(path: Path, wanted: Collection[str], limit: int = LIMIT) -> dict[str, bytes]:
    """The files of a tar archive whose last name is in `wanted`, by that name.

    Every member is checked, wanted or not: an archive that tries to leave its folder is not the official one.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(plain_bytes(path, limit)), mode="r:") as archive:
            for number, member in enumerate(archive):
                _check_member(path, number, member, limit)
                name = PurePosixPath(member.name).name
                if not member.isfile() or name not in wanted:
                    continue
                if name in found:
                    raise ValueError(f"{path}: holds {name!r} twice")
                file = archive.extractfile(member)
                found[name] = file.read() if file is not None else b""
                if len(found[name]) != member.size:
                    raise ValueError(f"{path}: {member.name!r} is truncated, {member.size:,} bytes are expected")
    except ValueError:
        raise
    except Exception as error:  # tarfile raises many kinds for damaged headers
        raise ValueError(f"{path}: not a readable tar archive ({error}); get it again") from error
    return found


def _check_member(path: Path, number: int, member: tarfile.TarInfo, limit: int) -> None:
    windows = PureWindowsPath(member.name)
    reason = None
    if number >= MEMBERS:
        raise ValueError(f"{path}: holds more than {MEMBERS:,} members; this is not the official file")
    if member.name.startswith("/") or windows.drive or windows.root or ".." in windows.parts:
        reason = "leaves the archive's folder"
    elif not (member.isfile() or member.isdir()):
        reason = "is a link or a device"
    elif not 0 <= member.size <= limit:
        reason = f"claims {member.size:,} bytes"
    if reason is not None:
        raise ValueError(f"{path}: member {member.name!r} {reason}; refused, get the official file")


def numbered_classes(largest: int, where: str) -> tuple[str, ...]:
    """The names "0", "1", ... of classes that have only numbers; a ValueError where a number can be no class."""
    if not 0 <= largest < CLASSES:
        raise ValueError(
            f"{where}: the largest label is {largest}, and class numbers are from 0 to {CLASSES - 1:,}; number the "
            "classes 0, 1, 2, ..."
        )
    return tuple(map(str, range(largest + 1)))


def check_labels(y: Labels, classes: int, where: str) -> None:
    """A ValueError that names the first label out of range."""
    wrong = np.flatnonzero((y < 0) | (y >= classes))
    if len(wrong):
        raise ValueError(
            f"{where}: sample {wrong[0]} has label {y[wrong[0]]}, but the labels of {classes} classes are "
            f"0 to {classes - 1}; this is another data set or a damaged file"
        )


def check_all_classes(arrays: Arrays, where: str) -> Arrays:
    """Refuse a training part that lacks a class: almost always another data set under this name."""
    absent = np.flatnonzero(np.bincount(arrays.train_y, minlength=len(arrays.classes)) == 0)
    if len(absent):
        raise ValueError(
            f"{where}: no training image of class {absent[0]} ({arrays.classes[absent[0]]}) and {len(absent) - 1} "
            f"other classes of {len(arrays.classes)}; is this another data set? A selection of classes loads as "
            "folder:PATH"
        )
    return arrays

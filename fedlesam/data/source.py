"""Where a data set lies on disk, and the arrays that its files decode to."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Arrays:
    """Raw samples of both parts: x is samples x channels x height x width, y the class numbers."""

    train_x: Pixels
    train_y: Labels
    test_x: Pixels
    test_y: Labels
    classes: tuple[str, ...]

    def named(self) -> dict[str, npt.NDArray[Any]]:
        return {"train_x": self.train_x, "train_y": self.train_y, "test_x": self.test_x, "test_y": self.test_y}


@dataclass(frozen=True)
class Source:
    """One form of one data set, found but not yet read."""

    kind: str
    """Whose rules decode it: the name of an official data set, or "folder"."""
    form: str
    """For people: "python archive", "parquet", ..."""
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
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path}: cannot be read: {error.strerror or error}; check that it exists and its permissions")


def check_labels(y: Labels, classes: int, where: str) -> None:
    """A ValueError that names the first label out of range."""
    wrong = np.flatnonzero((y < 0) | (y >= classes))
    if len(wrong):
        raise ValueError(
            f"{where}: sample {wrong[0]} has label {y[wrong[0]]}, but the labels of {classes} classes are "
            f"0 to {classes - 1}; this is another data set or a spoilt file"
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

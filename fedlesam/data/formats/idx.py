"""The idx files of MNIST and Fashion-MNIST, gzipped or not."""

import hashlib
import math
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlesam.data._files import Arrays, Source, check_all_classes, check_labels, plain_bytes
from fedlesam.data.catalogue import OFFICIAL, Official

BYTES = 8
"""The code for unsigned bytes, the only element type of these files."""

PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def parse(data: bytes, dimensions: int, where: str) -> npt.NDArray[np.uint8]:
    """The array in an idx file, whose header must agree with its length to the byte.

    Args:
        data: The whole file, unpacked.
        dimensions: How many the array must have.
        where: The file's name, for messages.
    """
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, BYTES, dimensions))
    if data[:4] != magic:
        raise ValueError(
            f"{where}: starts with {data[:4].hex(' ')!r}, expected {magic.hex(' ')!r} (bytes in {dimensions} "
            "dimensions); not this kind of file, or damaged"
        )
    if len(data) < header:
        raise ValueError(f"{where}: ends inside its header; truncated, get it again")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if len(data) - header != math.prod(shape):
        raise ValueError(
            f"{where}: holds {len(data) - header:,} values, but its header says {' x '.join(map(str, shape))}; "
            "truncated or damaged, get it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _own_bytes(known: Official, path: Path) -> bytes:
    """The contents, unless they are those of another official data set, which has the same file names."""
    data = plain_bytes(path)
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    for other in OFFICIAL.values():
        if other.name != known.name and md5 in other.plain_md5.values():
            raise ValueError(f"{path}: this is {other.name}, not {known.name}; load it by that name")
    return data


def _part(known: Official, images: Path, labels: Path) -> tuple[Any, Any]:
    x = parse(_own_bytes(known, images), 3, str(images))
    y = parse(_own_bytes(known, labels), 1, str(labels)).astype(np.int64)
    if x.shape[1:] != known.shape[1:]:
        raise ValueError(f"{images}: images of {x.shape[1:]}, expected {known.shape[1:]}; this is not {known.name}")
    if len(x) != len(y) or not len(x):
        counts = f"{len(x)} images, but {labels.name} has {len(y)} labels"
        raise ValueError(f"{images}: {counts}; they do not belong together")
    check_labels(y, len(known.classes), str(labels))
    return x[:, None], y


def _spellings(root: Path, part: str) -> list[Path]:
    stems = (part, part.replace("-idx", ".idx"))
    return [root / f"{stem}-ubyte{suffix}" for stem in stems for suffix in ("", ".gz")]


def _decode(known: Official, files: tuple[Path, ...]) -> Arrays:
    arrays = Arrays(*_part(known, *files[:2]), *_part(known, *files[2:]), known.classes)
    return check_all_classes(arrays, str(files[1]))


def find(known: Official, root: Path) -> list[Source]:
    """The four files in `root`, each in any of its spellings.

    Args:
        known: The data set.
        root: The folder that is searched.
    """
    files = tuple(next(filter(Path.is_file, _spellings(root, part)), root / f"{part}-ubyte.gz") for part in PARTS)
    missing = tuple(path for path in files if not path.is_file())
    if len(missing) == len(PARTS):
        return []
    return [Source(known.name, "idx files", root, files, partial(_decode, known, files), missing)]

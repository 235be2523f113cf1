"""Parquet files of pictures with a column that names who drew each of them."""

from functools import partial
from pathlib import Path

import numpy as np

from fedlesam.data._files import Arrays, Source, check_all_classes
from fedlesam.data.catalogue import OFFICIAL, FileRequest
from fedlesam.data.formats import parquet

PICTURES = "mnist"
"""The data set whose pictures they are."""


def find(request: FileRequest, root: Path) -> Source | None:
    """Both files in a folder.

    Args:
        request: What the user asked for.
        root: The folder.
    """
    files = (root / "train.parquet", root / "test.parquet")
    if not files[0].is_file():
        return None
    missing = tuple(path for path in files if not path.is_file())
    decode = partial(_decode, *files, request.known.client)
    return Source(request.kind, "parquet", root, tuple(path for path in files if path.is_file()), decode, missing)


def _decode(train: Path, test: Path, client: str) -> Arrays:
    known = OFFICIAL[PICTURES]
    (x, y), (u, v) = (parquet.read(known, path) for path in (train, test))
    of, others = (parquet.column(path, client) for path in (train, test))
    names, owner = np.unique(of, return_inverse=True)
    number = {name: place for place, name in enumerate(names.tolist())}
    theirs = np.array([number.get(name, -1) for name in others.tolist()], np.int64)
    own = theirs if (theirs >= 0).any() else None
    titles = tuple(f"{client} {name}" for name in names.tolist())
    return check_all_classes(Arrays(x, y, u, v, known.classes, owner.astype(np.int64), own, titles), str(train))

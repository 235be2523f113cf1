"""Parquet files as data hubs store image sets: a column of image bytes and a column of class numbers."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedlesam.data._files import Arrays, Part, Source, Values, check_all_classes, check_labels, read_bytes
from fedlesam.data.catalogue import Official, fetch_hint
from fedlesam.data.formats import images

IMAGE_COLUMNS = ("img", "image")
SHARD = re.compile(r".*-\d+-of-(\d+)\.parquet")
ROWS = 1000
"""Read at a time."""


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'fedlesam[parquet]'") from error
    return pyarrow


def _column(names: list[str], wanted: tuple[str, ...], path: Path) -> str:
    for name in wanted:
        if name in names:
            return name
    raise ValueError(f"{path}: has no column {' or '.join(map(repr, wanted))}; its columns are {', '.join(names)}")


def read(known: Official, path: Path) -> Part:
    """The pictures and class numbers of a file.

    Args:
        known: What they are pictures of.
        path: The file.
    """
    arrow = _pyarrow()
    label_columns = ("fine_label", "label") if known.name == "cifar100" else ("label",)
    try:
        with arrow.parquet.ParquetFile(arrow.BufferReader(read_bytes(path)), page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            image, label = _column(names, IMAGE_COLUMNS, path), _column(names, label_columns, path)
            _check_types(arrow, file.schema_arrow, image, label, path)
            x = np.empty((file.metadata.num_rows, *known.shape), np.uint8)
            y = np.empty(len(x), np.int64)
            row = 0
            for batch in file.iter_batches(ROWS, columns=[image, label], use_threads=False):
                for packed, number in zip(batch[image].to_pylist(), batch[label].to_pylist(), strict=True):
                    data = packed.get("bytes") if isinstance(packed, dict) else packed
                    if data is None or number is None:
                        empty = label if number is None else image
                        raise ValueError(f"{path}, row {row}: column {empty!r} is empty; images must be in the file")
                    x[row] = images.decode(data, known.shape, f"{path}, row {row}")
                    y[row] = number
                    row += 1
    except (arrow.ArrowException, OSError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a readable parquet file ({reason}); truncated or damaged") from error
    if row != len(x):
        raise ValueError(f"{path}: holds {row} of {len(x)} rows; truncated or damaged")
    check_labels(y, len(known.classes), str(path))
    return x, y


def column(path: Path, name: str) -> Values:
    """A column of whole numbers or texts, none of them missing.

    Args:
        path: The file.
        name: Of the column.
    """
    arrow = _pyarrow()
    try:
        with arrow.parquet.ParquetFile(arrow.BufferReader(read_bytes(path)), page_checksum_verification=True) as file:
            _column(file.schema_arrow.names, (name,), path)
            values = file.read([name], use_threads=False)[name]
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a readable parquet file ({reason}); truncated or damaged") from error
    if not (arrow.types.is_integer(values.type) or arrow.types.is_string(values.type)):
        raise ValueError(f"{path}: column {name!r} is {values.type}; expected whole numbers or texts")
    if values.null_count:
        raise ValueError(f"{path}: column {name!r} is empty in {values.null_count} rows; every sample needs a client")
    return np.asarray(values.to_pylist())


def _check_types(arrow: Any, schema: Any, image: str, label: str, path: Path) -> None:
    kind = schema.field(image).type
    inner = [kind.field(i) for i in range(kind.num_fields)] if arrow.types.is_struct(kind) else []
    data = next((field.type for field in inner if field.name == "bytes"), kind)
    if not (arrow.types.is_binary(data) or arrow.types.is_large_binary(data)):
        raise ValueError(f"{path}: column {image!r} is {kind}; expected encoded images, struct<bytes: binary, ...>")
    if not arrow.types.is_integer(schema.field(label).type):
        raise ValueError(f"{path}: column {label!r} is {schema.field(label).type}; expected whole numbers")


def _decode(known: Official, train: tuple[Path, ...], test: tuple[Path, ...]) -> Arrays:
    parts: list[Part] = []
    for paths in (train, test):
        found = [read(known, path) for path in paths]
        parts.append((np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found])))
        if not len(parts[-1][0]):
            raise ValueError(f"{paths[0]}: holds no rows; {fetch_hint(known.name, paths[0].parent)}")
    return check_all_classes(Arrays(*parts[0], *parts[1], known.classes), str(train[0]))


def _shards(folder: Path, part: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files of a part, and those that their numbering says are missing."""
    whole = folder / f"{part}.parquet"
    if whole.is_file():
        return (whole,), ()
    found = tuple(sorted(folder.glob(f"{part}-*.parquet")))
    count = max((int(match[1]) for path in found if (match := SHARD.fullmatch(path.name))), default=0)
    wanted = [folder / f"{part}-{i:05d}-of-{count:05d}.parquet" for i in range(count if count <= 10_000 else 0)]
    return found, tuple(path for path in wanted if path not in found) if found else (whole,)


def find(known: Official, root: Path) -> list[Source]:
    """Parquet files in `root`, or in the folders the hubs put them in.

    Args:
        known: The data set.
        root: The folder that is searched.
    """
    sources = []
    for folder in (root, root / "data", root / "plain_text"):
        (train, gaps), (test, test_gaps) = _shards(folder, "train"), _shards(folder, "test")
        if files := (*train, *test):
            decode = partial(_decode, known, train, test)
            sources.append(Source(known.name, "parquet", root, files, decode, (*gaps, *test_gaps)))
    return sources

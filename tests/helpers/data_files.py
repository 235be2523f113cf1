"""Small data sets in every official layout, made from the same random images."""

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fedlesam.data.catalogue import OFFICIAL


class Made(NamedTuple):
    name: str
    train_x: Any
    train_y: Any
    test_x: Any
    test_y: Any

    @property
    def classes(self) -> tuple[str, ...]:
        return OFFICIAL[self.name].classes


def images(name: str, seed: int = 0) -> Made:
    """Sorted by class, so that class folders keep the order."""
    known = OFFICIAL[name]
    draw = np.random.default_rng(seed)
    train_y = np.repeat(np.arange(len(known.classes)), 2 if len(known.classes) > 10 else 5)
    test_y = np.arange(len(known.classes))
    parts = [draw.integers(0, 256, (len(y), *known.shape), dtype=np.uint8) for y in (train_y, test_y)]
    return Made(name, parts[0], train_y, parts[1], test_y)


class _Python2(pickle._Pickler):
    """Text and bytes are both Python 2 strings, as in the official files."""

    def string(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        if len(data) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(data)]) + data)
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch = pickle._Pickler.dispatch | {str: string, bytes: string}


def python2_pickle(value: Any) -> bytes:
    file = io.BytesIO()
    _Python2(file, 2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def cifar_python(made: Made, pickled: Callable[[Any], bytes] = python2_pickle) -> dict[str, bytes]:
    def batch(x: Any, y: Any, label: str) -> bytes:
        key = "labels" if made.name == "cifar10" else "fine_labels"
        content = {"batch_label": label, "data": x.reshape(len(x), -1), key: y.tolist()}
        content |= {"filenames": [f"image_{i}.png" for i in range(len(x))]}
        if made.name == "cifar100":
            content["coarse_labels"] = [0] * len(y)
        return pickled(content)

    if made.name == "cifar100":
        files = {"train": batch(made.train_x, made.train_y, "training"), "test": batch(made.test_x, made.test_y, "t")}
        return files | {"meta": pickled({"fine_label_names": list(made.classes)})}
    parts = zip(np.split(made.train_x, 5), np.split(made.train_y, 5), strict=True)
    files = {f"data_batch_{i}": batch(x, y, f"batch {i} of 5") for i, (x, y) in enumerate(parts, 1)}
    files["test_batch"] = batch(made.test_x, made.test_y, "test")
    return files | {"batches.meta": pickled({"label_names": list(made.classes)})}


def cifar_binary(made: Made) -> dict[str, bytes]:
    def records(x: Any, y: Any) -> bytes:
        heads = [y[:, None]] if made.name == "cifar10" else [y[:, None] // 5, y[:, None]]
        return np.concatenate([*heads, x.reshape(len(x), -1)], 1).astype(np.uint8).tobytes()

    if made.name == "cifar100":
        return {"train.bin": records(made.train_x, made.train_y), "test.bin": records(made.test_x, made.test_y)}
    parts = zip(np.split(made.train_x, 5), np.split(made.train_y, 5), strict=True)
    files = {f"data_batch_{i}.bin": records(x, y) for i, (x, y) in enumerate(parts, 1)}
    return files | {"test_batch.bin": records(made.test_x, made.test_y)}


def cifar_folder(made: Made, version: str) -> str:
    long = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}
    return long[version] if made.name == "cifar10" else f"cifar-100-{version}"


def cifar_archive(made: Made, version: str) -> str:
    return f"cifar-{made.name.removeprefix('cifar')}-{version}.tar.gz"


def tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def write_python(root: Path, made: Made, packed: bool) -> None:
    _write(root, made, "python", cifar_python(made), packed)


def write_binary(root: Path, made: Made, packed: bool) -> None:
    _write(root, made, "binary", cifar_binary(made), packed)


def _write(root: Path, made: Made, version: str, files: dict[str, bytes], packed: bool) -> None:
    folder = cifar_folder(made, version)
    root.mkdir(exist_ok=True, parents=True)
    if packed:
        (root / cifar_archive(made, version)).write_bytes(tar({f"{folder}/{name}": d for name, d in files.items()}))
        return
    (root / folder).mkdir()
    for name, data in files.items():
        (root / folder / name).write_bytes(data)


def png(x: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(x[0] if len(x) == 1 else x.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


def write_parquet(root: Path, made: Made, image: str = "img", label: str | None = None, shards: int = 1) -> None:
    import pyarrow
    import pyarrow.parquet

    label = label or ("label" if made.name != "cifar100" else "fine_label")
    root.mkdir(exist_ok=True, parents=True)
    for part, x, y in (("train", made.train_x, made.train_y), ("test", made.test_x, made.test_y)):
        for i, chosen in enumerate(np.array_split(np.arange(len(y)), shards)):
            packed = [{"bytes": png(x[j]), "path": f"{j}.png"} for j in chosen]
            table = pyarrow.table({image: packed, label: y[chosen]})
            name = f"{part}.parquet" if shards == 1 else f"{part}-{i:05d}-of-{shards:05d}.parquet"
            pyarrow.parquet.write_table(table, root / name)


def write_folders(root: Path, made: Made, names: tuple[str, ...] | None = None) -> None:
    for part, x, y in (("train", made.train_x, made.train_y), ("test", made.test_x, made.test_y)):
        for i, (image, number) in enumerate(zip(x, y, strict=True)):
            folder = root / part / (names or made.classes)[number]
            folder.mkdir(exist_ok=True, parents=True)
            (folder / f"{i:04d}.png").write_bytes(png(image))


def idx(array: Any) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(root: Path, made: Made, packed: bool = True, dotted: bool = False) -> None:
    root.mkdir(exist_ok=True, parents=True)
    for part, x, y in (("train", made.train_x, made.train_y), ("t10k", made.test_x, made.test_y)):
        for kind, array in (("images-idx3", x[:, 0]), ("labels-idx1", y)):
            name = f"{part}-{kind}-ubyte" + (".gz" if packed else "")
            data = gzip.compress(idx(array)) if packed else idx(array)
            (root / (name.replace("-idx", ".idx") if dotted else name)).write_bytes(data)

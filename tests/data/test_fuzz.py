"""Truncated and flipped bytes: a ValueError, or data of the right form, and never anything else."""

import gzip
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import (
    cifar_binary,
    cifar_python,
    idx,
    images,
    tar,
    write_binary,
    write_folders,
    write_idx,
    write_parquet,
    write_python,
)
from fuzzing import FACTOR, damage, damage_tree, fuzz, make_tree, one_line, read_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlesam.data import catalogue
from fedlesam.data._files import plain_bytes, tar_members
from fedlesam.data.catalogue import OFFICIAL
from fedlesam.data.dataset import DataSet, Images
from fedlesam.data.formats import images as pictures
from fedlesam.data.formats._pickle import safe_loads
from fedlesam.data.formats.cifar import _pickled, _records
from fedlesam.data.formats.idx import parse
from fedlesam.data.splits import make_split, save_split

CIFAR = OFFICIAL["cifar10"]
MADE = images("cifar10")
PICKLED = cifar_python(MADE)["data_batch_1"]
HEADS = [i for i in range(len(PICKLED)) if i < 400 or i > len(PICKLED) - 1500]
"""Not the pixels: damage there is not to be seen without a checksum."""

changes = st.lists(st.tuples(st.integers(0, 2**30), st.integers(1, 255)), min_size=1, max_size=3)


def damaged(data: bytes, where: list[tuple[int, int]], places: list[int] | None = None) -> bytes:
    out = bytearray(data)
    for place, change in where:
        out[places[place % len(places)] if places else place % len(out)] ^= change
    return bytes(out)


@settings(max_examples=300 * FACTOR)
@given(changes)
def test_flipped_pickle(where: list[tuple[int, int]]) -> None:
    try:
        x, y = _pickled(damaged(PICKLED, where, HEADS), "here", CIFAR)
    except ValueError as error:
        assert str(error).startswith("here: ")
    else:
        assert x.dtype == np.uint8
        assert x.shape[1:] == (3, 32, 32)
        assert len(x) == len(y)


@settings(max_examples=60 * FACTOR)
@given(st.integers(0, len(PICKLED) - 1))
def test_truncated_pickle(size: int) -> None:
    with pytest.raises(ValueError, match=r"^here: "):
        safe_loads(PICKLED[:size], "here")


@settings(max_examples=300 * FACTOR)
@given(st.binary(max_size=60))
def test_any_bytes_as_a_pickle(data: bytes) -> None:
    try:
        assert isinstance(safe_loads(data, "here"), dict)
    except ValueError as error:
        assert str(error).startswith("here: ")


@settings(max_examples=60 * FACTOR)
@given(changes, st.integers(0, 3073 * 10))
def test_damaged_records(where: list[tuple[int, int]], size: int) -> None:
    data = damaged(cifar_binary(MADE)["data_batch_1.bin"], where)[:size]
    try:
        x, y = _records(data, "here", CIFAR)
    except ValueError as error:
        assert "here: " in str(error)
        assert size % 3073
    else:
        assert len(x) == len(y) == size // 3073


IDX = idx(images("mnist").train_x[:, 0])


@settings(max_examples=150 * FACTOR)
@given(changes, st.booleans())
def test_damaged_idx(where: list[tuple[int, int]], in_header: bool) -> None:
    try:
        found = parse(damaged(IDX, where, list(range(16)) if in_header else None), 3, "here")
    except ValueError as error:
        assert "here: " in str(error)
    else:
        assert found.size == len(IDX) - 16


@settings(max_examples=60 * FACTOR)
@given(st.integers(0, len(IDX) - 1))
def test_truncated_idx(size: int) -> None:
    with pytest.raises(ValueError, match=r"^here: "):
        parse(IDX[:size], 3, "here")


MEMBERS = {f"cifar-10-batches-bin/{i}": bytes(range(256)) * 20 for i in range(3)}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_damaged_archive(mode: str, tmp_path: Path) -> None:
    """Gzipped, every damage to the contents is seen; a bare tar has only its headers to check."""
    whole = tar(MEMBERS, mode)
    path = tmp_path / "x"
    wanted = {name.split("/")[1]: data for name, data in MEMBERS.items()}

    @settings(max_examples=200 * FACTOR)
    @given(changes, st.integers(0, len(whole)))
    def run(where: list[tuple[int, int]], size: int) -> None:
        path.write_bytes(damaged(whole, where)[: size if where[0][1] % 2 else None])
        try:
            found = tar_members(path, wanted)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            if mode == "w:gz":
                assert found in (wanted, {})
            assert set(found) <= set(wanted)

    run()


def test_damaged_pictures() -> None:
    """All formats that are read; a header may claim any size."""
    from io import BytesIO

    from PIL import Image

    whole = []
    for kind in ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF"):
        file = BytesIO()
        Image.fromarray(MADE.train_x[0].transpose(1, 2, 0)).save(file, kind)
        whole.append(file.getvalue())

    def damaged(draw: random.Random) -> str:
        data = damage(draw, draw.choice(whole), whole)
        try:
            pictures.header(data, "here")
            found = pictures.decode(data, (3, 32, 32), "here")
        except ValueError as error:
            assert str(error).startswith("here: ")
            one_line(error)
            return "refused"
        assert (found.shape, found.dtype) == ((3, 32, 32), np.uint8)
        return "taken"

    fuzz("pictures", 200, damaged)


def test_damaged_gzip(tmp_path: Path) -> None:
    """To the last byte what was packed, or refused."""
    whole = gzip.compress(IDX)

    def damaged(draw: random.Random) -> str:
        data = damage(draw, whole)
        (tmp_path / "x").write_bytes(data)
        try:
            found = plain_bytes(tmp_path / "x", limit=10**6)
        except ValueError as error:
            assert str(error).startswith(f"{tmp_path / 'x'}: ")
            return "refused"
        if found == IDX:
            return "exact"
        assert found == data or found.startswith(IDX) or len(found) == 0
        return "not gzip, or more than once"

    fuzz("gzip", 200, damaged)


@pytest.mark.parametrize("form", ["python", "python.tar.gz", "binary", "parquet", "folders", "idx"])
def test_damaged_data_folders(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `run` reads them, with a cache: the same data as before, data of the right form, or one line."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    root, name = tmp_path / "data", "mnist" if form == "idx" else "cifar10"
    small = MADE._replace(train_x=MADE.train_x[::5], train_y=MADE.train_y[::5])
    write = {
        "python": lambda: write_python(root, MADE, False),
        "python.tar.gz": lambda: write_python(root, MADE, True),
        "binary": lambda: write_binary(root, MADE, False),
        "parquet": lambda: write_parquet(root, small),
        "folders": lambda: write_folders(root, small),
        "idx": lambda: write_idx(root, images("mnist")),
    }
    write[form]()
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "cache"))
    logging.getLogger("fedlesam").setLevel(logging.ERROR)
    whole = read_tree(root)
    before = catalogue.load(name, root).fingerprint
    cached = read_tree(tmp_path / "cache")
    assert cached
    files = [file for file, content in whole.items() if content != "dir"]
    entries = [file for file, content in cached.items() if content != "dir"]

    def damaged(draw: random.Random) -> str:
        in_cache = draw.random() < 0.3
        make_tree(tmp_path / "cache", damage_tree(draw, cached, entries) if in_cache else cached)
        tree = whole if in_cache else damage_tree(draw, whole, files)
        make_tree(root, tree)
        try:
            found = catalogue.load(name, root)
        except ValueError as error:
            assert not in_cache, f"what is wrong with the cache is no reason: {error}"
            assert str(root) in str(error), f"does not say where: {error!r}"
            one_line(error)
            return "refused"
        finally:
            assert read_tree(root) == tree
        if found.fingerprint == before:
            return "exact"
        assert not in_cache
        assert found.train.x.shape[1:] == found.test.x.shape[1:] == OFFICIAL[name].shape
        assert len(found.train.x) == len(found.train.y)
        assert 0 <= int(found.train.y.min()) <= int(found.train.y.max()) < 10
        return "other data of the right form"

    try:
        fuzz(f"data: {form}", 40, damaged)
    finally:
        logging.getLogger("fedlesam").setLevel(logging.NOTSET)


def test_damaged_splits(tmp_path: Path) -> None:
    """A saved split comes back as it was or not at all; client ids are whole or refused."""
    y = torch.arange(60) % 3
    data = DataSet(
        "x",
        Images(torch.zeros(60, 1, 1, 1), y),
        Images(torch.zeros(3, 1, 1, 1), y[:3]),
        ("a", "b", "c"),
        (0.0,),
        (1.0,),
    )
    split = make_split("dirichlet:0.5", data, 5, 0)
    save_split(split, data, tmp_path / "split.safetensors")
    np.save(tmp_path / "owners.npy", y.numpy())
    for suffix in ("csv", "txt"):
        (tmp_path / f"owners.{suffix}").write_text("".join(f"{i}\n" for i in y.tolist()))
    whole = read_tree(tmp_path)

    def damaged(draw: random.Random) -> str:
        name = draw.choice(["split.safetensors", *sorted(whole)])
        tree = damage_tree(draw, whole, [name])
        make_tree(tmp_path, tree)
        kind = "file" if name.startswith("split") else "by"
        try:
            found = make_split(f"{kind}:{tmp_path / name}", data, None, 0)
        except ValueError as error:
            assert str(tmp_path / name) in str(error), f"does not say where: {error!r}"
            one_line(error)
            return "refused"
        if kind == "file":
            assert found.hash == split.hash
            return "exact"
        assert int(found.sizes.sum()) == 60
        return "other owners, complete"

    fuzz("splits", 200, damaged)

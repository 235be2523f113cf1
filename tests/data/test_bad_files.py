"""Files that are missing, damaged or hostile: a message with place and remedy, and nothing of theirs is run or kept."""

import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import (
    cifar_binary,
    cifar_python,
    idx,
    images,
    png,
    tar,
    write_binary,
    write_folders,
    write_idx,
    write_parquet,
    write_python,
)
from PIL import Image

from fedlesam.data import _files, load
from fedlesam.data.formats._pickle import safe_loads

MADE = images("cifar10")
BATCHES = "cifar-10-batches-py"


def refused(match: str, name: str = "cifar10", data_dir: Path | None = None) -> str:
    with pytest.raises(ValueError, match=match) as error:
        load(name, data_dir)
    return str(error.value)


def test_nothing_there(tmp_path: Path, cache: Path) -> None:
    message = refused("not found", data_dir=tmp_path)
    for part in (str(tmp_path / "cifar10"), "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "train.parquet"):
        assert part in message
    assert f"fedlesam data fetch cifar10 --data-dir {tmp_path}" in message
    assert "train-images-idx3-ubyte" in refused("not found", "mnist", tmp_path / "absent")
    assert not list(cache.iterdir())


def test_incomplete(tmp_path: Path) -> None:
    write_python(tmp_path, MADE, packed=False)
    (tmp_path / BATCHES / "data_batch_4").unlink()
    refused("incomplete: missing .*data_batch_4; .*fetch cifar10", data_dir=tmp_path)
    write_idx(tmp_path, images("mnist"))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    refused("missing .*t10k-labels-idx1-ubyte.gz", "mnist", tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_parquet(tmp_path, MADE, shards=2)
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    refused("missing .*train-00001-of-00002.parquet", data_dir=tmp_path)


def test_archive_without_a_batch(tmp_path: Path) -> None:
    files = cifar_binary(MADE)
    del files["test_batch.bin"]
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar({f"x/{name}": data for name, data in files.items()}))
    refused("holds no test_batch.bin", data_dir=tmp_path)


@pytest.mark.parametrize("size", [0, 10, 1000, -1])
def test_truncated_archive(size: int, tmp_path: Path, cache: Path) -> None:
    write_python(tmp_path, MADE, packed=True)
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(path.read_bytes()[:size])
    assert str(path) in refused("truncated|not a readable tar", data_dir=tmp_path)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "..\\x", "C:\\x", "\\\\host\\x"])
def test_archive_that_leaves_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(tar({name: b"x"}))
    refused("leaves the archive's folder", data_dir=tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["cifar-10-python.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_archive_with_links_and_devices(kind: bytes, tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        member = tarfile.TarInfo(f"{BATCHES}/data_batch_1")
        member.type, member.linkname = kind, "/etc/passwd"
        made.addfile(member)
    (tmp_path / "cifar-10-python.tar").write_bytes(file.getvalue())
    refused("is a link or a device", data_dir=tmp_path)


def test_archive_too_large(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(bytes(2_000_000)))
    with pytest.raises(ValueError, match="unpacks to more than 1,000,000"):
        _files.tar_members(path, {"x"}, limit=1_000_000)
    member = tarfile.TarInfo("x")
    member.size = 2**40
    path.write_bytes(member.tobuf())
    with pytest.raises(ValueError, match="claims 1,099,511,627,776 bytes"):
        _files.tar_members(path, {"x"})


def test_archive_with_a_member_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar({"a/x": b"1", "b/x": b"2"}, "w"))
    with pytest.raises(ValueError, match="'x' twice"):
        _files.tar_members(path, {"x"})


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_foreign_class_is_not_run(protocol: int, tmp_path: Path) -> None:
    write_python(tmp_path, MADE, packed=False)
    content = {"data": MADE.train_x, "labels": Bomb(tmp_path / "run")}
    (tmp_path / BATCHES / "data_batch_2").write_bytes(pickle.dumps(content, protocol))
    message = refused(f"{os.mkdir.__module__}.mkdir", data_dir=tmp_path)
    assert "data_batch_2" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x02cbuiltins\nobject\n)\x81.",
        b"\x80\x04\x8c\x05numpy\x8c\x07fromfile\x93.",
        b"cnumpy\nndarray.__class__\n.",
        b"cnumpy\nndarray\n}S'x'\nI1\nsb.",
        b"c_codecs\nencode\n}S'__doc__'\nS'x'\nsb.",
        b"c_codecs\nencode\n(S'x'\nS'zlib'\ntR.",
        b"Pname\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x02}r\xff\xff\xff\xff.junk",
        b"}(I1\ntI1\ns.",
        b"}" + b")" + b"\x85" * 300_000 + b"I1\ns.",
        b"\x80\x04\x8f(" + b")" + b"\x85" * 300_000 + b"\x90.",
        b"\x80\x02cnumpy\ndtype\n)\x81.",
        b"\x80\x02cnumpy\nload\n(S'x'\ntR.",
        b"]c_codecs\nencode\nb.",
        b"}.}",
        b"I1\n.",
        b"",
    ],
)
def test_programs_that_are_not_data(program: bytes) -> None:
    before = dict(vars(sys.modules["fedlesam.data.formats._pickle"]))
    with pytest.raises(ValueError, match=r"^here: "):
        safe_loads(program, "here")
    assert vars(sys.modules["fedlesam.data.formats._pickle"]) == before


def _swap(**changes: Any) -> Callable[[Any], bytes]:
    return lambda value: pickle.dumps(value | {k: v for k, v in changes.items() if "data" in value}, 2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"labels": [10] * 10}, "sample 0 has label 10, but the labels of 10 classes are 0 to 9"),
        ({"labels": [-1] * 10}, "label -1"),
        ({"labels": [1] * 9}, "not a list of 10 whole numbers"),
        ({"labels": ["a"] * 10}, "whole numbers"),
        ({"labels": None}, "whole numbers"),
        ({"data": np.zeros((10, 3071), np.uint8)}, r"'data' is \(10, 3071\)"),
        ({"data": np.zeros((10, 3072), np.int64)}, "expected bytes"),
        ({"data": np.zeros((10, 3072), np.float32)}, "array of type 'f4'"),
        ({"data": np.zeros(3, object)}, "array of type 'O8'"),
        ({"data": None}, "'data' is NoneType"),
    ],
)
def test_wrong_contents_of_a_batch(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    (tmp_path / BATCHES).mkdir()
    for name, data in cifar_python(MADE, _swap(**change)).items():
        (tmp_path / BATCHES / name).write_bytes(data)
    assert "data_batch_1" in refused(match, data_dir=tmp_path)


def test_batch_without_labels(tmp_path: Path) -> None:
    write_python(tmp_path, MADE, packed=False)
    (tmp_path / BATCHES / "test_batch").write_bytes(pickle.dumps({"data": MADE.test_x}))
    refused("test_batch: holds no 'labels'", data_dir=tmp_path)


def test_binary_cut_inside_and_between_records(tmp_path: Path) -> None:
    write_binary(tmp_path, MADE, packed=False)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused("not a multiple of 3073", data_dir=tmp_path)
    path.write_bytes(whole[:-3073])
    refused("different sizes.*'data_batch_2.bin': 9", data_dir=tmp_path)
    path.write_bytes(b"")
    refused("data_batch_2.bin: holds no images", data_dir=tmp_path)


def test_another_data_set_under_the_name(tmp_path: Path) -> None:
    write_parquet(tmp_path, MADE, label="label")
    refused("no training image of class 10 .*another data set", "cifar100", tmp_path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "starts with ''"),
        (b"\0\0\x08\x01" + bytes(4), "expected '00 00 08 03'"),
        (b"\0\0\x08\x03\0\0", "inside its header"),
        (idx(np.zeros((50, 28, 28)))[:-1], "holds 39,199 values, but its header says 50 x 28 x 28"),
        (idx(np.zeros((50, 27, 28))), "expected \\(28, 28\\)"),
        (idx(np.zeros((49, 28, 28))), "49 images, but .* has 50 labels"),
        (b"\x1f\x8b\x08" + bytes(20), "truncated or damaged"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "its header says"),
    ],
)
def test_bad_idx(data: bytes, match: str, tmp_path: Path) -> None:
    write_idx(tmp_path, images("mnist"), packed=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(data)
    assert "train-images-idx3-ubyte" in refused(match, "mnist", tmp_path)


def test_idx_label_out_of_range(tmp_path: Path) -> None:
    write_idx(tmp_path, images("mnist"), packed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(10, 77)))
    refused("label 77", "mnist", tmp_path)


def _parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


GOOD = png(MADE.train_x[0])


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"picture": [GOOD], "label": [1]}, "no column 'img' or 'image'; its columns are picture, label"),
        ({"img": [{"bytes": GOOD}], "fine_label": [1]}, "no column 'label'"),
        ({"img": ["text"], "label": [1]}, "column 'img' is string"),
        ({"img": [{"bytes": GOOD}], "label": ["cat"]}, "column 'label' is string"),
        ({"img": [{"bytes": GOOD}, {"bytes": None}], "label": [1, 2]}, "row 1: column 'img' is empty"),
        ({"img": [{"bytes": GOOD}], "label": [10]}, "label 10"),
        ({"img": [{"bytes": GOOD}, {"bytes": b"rubbish"}], "label": [1, 2]}, "row 1: does not decode as an image"),
        ({"img": [{"bytes": GOOD[:-300]}], "label": [1]}, "row 0: does not decode"),
        ({"img": [{"bytes": png(MADE.train_x[0][:, :16])}], "label": [1]}, "32 x 16, expected 32 x 32"),
    ],
)
def test_bad_parquet(columns: dict[str, Any], match: str, tmp_path: Path) -> None:
    write_parquet(tmp_path, MADE)
    _parquet(tmp_path / "test.parquet", columns)
    assert "test.parquet" in refused(match, data_dir=tmp_path)


def test_damaged_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path, MADE)
    path = tmp_path / "train.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    refused("train.parquet: not a readable parquet file", data_dir=tmp_path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path, MADE)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"pip install 'fedlesam\[parquet\]'", data_dir=tmp_path)


def test_bad_folders(tmp_path: Path) -> None:
    name = f"folder:{tmp_path}"
    refused("train: no such folder; expected", name)
    write_folders(tmp_path, MADE)
    cat = tmp_path / "train" / "cat"

    (cat / "x.png").write_bytes(b"rubbish")
    assert str(cat / "x.png") in refused("does not decode as an image", name)
    (cat / "x.png").write_bytes(GOOD[:-500])
    assert str(cat / "x.png") in refused("does not decode as an image", name)
    (cat / "x.png").write_bytes(png(MADE.train_x[0][:, :, :20]))
    message = refused("is 20 x 32, but .* is 32 x 32; all images must have the same size, resize", name)
    assert str(cat / "x.png") in message
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(cat / "x.png")
    refused("more than 8 bits", name)
    (cat / "x.png").unlink()

    (cat / "nested").mkdir()
    refused("nested: a folder inside a class", name)
    (cat / "nested").rmdir()
    (tmp_path / "test" / "unicorn").mkdir()
    refused("unicorn: a class without images", name)
    (tmp_path / "test" / "unicorn" / "x.png").write_bytes(GOOD)
    refused("unicorn: a class that .*train does not have", name)
    refused("unicorn: not a class of cifar10 .* use --data folder:", data_dir=tmp_path)


def test_folder_without_classes(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
    refused("train: holds no class folders", f"folder:{tmp_path}")


def test_unreadable(tmp_path: Path) -> None:
    write_binary(tmp_path, MADE, packed=False)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    refused("test_batch.bin: cannot be read", data_dir=tmp_path)

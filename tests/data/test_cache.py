"""The cache is used when it is whole and fits the source, and is never in the way."""

import contextlib
import functools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import images, write_binary, write_folders
from numpy import memmap
from processes import fork

from fedlesam.data import cache as module
from fedlesam.data import load
from fedlesam.data._load import source_of
from fedlesam.data.cache import Damaged, _mapped, prepare

MADE = images("cifar10")


def entry(cache: Path) -> Path:
    (folder,) = (cache / "data").iterdir()
    return folder


def test_second_load_is_mapped(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(tmp_path, MADE, packed=True)
    source = source_of("cifar10", tmp_path)
    first = prepare(source)
    assert not first.cached
    monkeypatch.setattr("fedlesam.data.formats.cifar.tar_members", None)
    second = prepare(source_of("cifar10", tmp_path))
    assert second.cached
    for one in (first, second):
        assert isinstance(one.arrays.train_x, memmap)
        assert np.array_equal(one.arrays.train_x, MADE.train_x)
    assert (first.mean, first.std, first.fingerprint) == (second.mean, second.std, second.fingerprint)


def test_changes_in_memory_stay_there(tmp_path: Path) -> None:
    write_binary(tmp_path, MADE, packed=True)
    load("cifar10", tmp_path).train.x.zero_()
    assert np.array_equal(load("cifar10", tmp_path).train.x.numpy(), MADE.train_x)


@pytest.mark.parametrize("file", ["entry", "train_x.bin", "train_y.bin", "test_x.bin", "test_y.bin"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_damage_is_found_and_mended(
    file: str, damage: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_binary(tmp_path, MADE, packed=True)
    load("cifar10", tmp_path)
    path = entry(cache) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    changed = {"flip": bytes(data), "cut": bytes(data[:-1]), "grow": bytes(data) + b"x"}
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(load("cifar10", tmp_path).train.x.numpy(), MADE.train_x)
    if (file, damage) != ("entry", "remove"):
        assert "is damaged" in caplog.text
        assert "rebuilt" in caplog.text
    caplog.clear()
    load("cifar10", tmp_path)
    assert not caplog.text
    assert len(list((cache / "data").iterdir())) == 1


def test_changed_source_is_never_stale(tmp_path: Path) -> None:
    """Also when size and times are those of before."""
    write_binary(tmp_path, MADE, packed=False)
    load("cifar10", tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[5] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load("cifar10", tmp_path).test.x[0, 0, 0, 4] == 255 - MADE.test_x[0, 0, 0, 4]


def test_moved_image_is_another_source(tmp_path: Path) -> None:
    write_folders(tmp_path, MADE)
    one = load(f"folder:{tmp_path}")
    path = next((tmp_path / "train" / "cat").iterdir())
    path.rename(tmp_path / "train" / "dog" / path.name)
    two = load(f"folder:{tmp_path}")
    assert one.fingerprint != two.fingerprint
    assert two.train.y.bincount().tolist()[3] == 4


def test_source_that_changes_while_it_is_read(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(tmp_path, MADE, packed=False)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    monkeypatch.setattr(module, "open_entry", lambda *_: path.write_bytes(path.read_bytes() * 2) and None)
    with pytest.raises(ValueError, match="changed while they were read"):
        load("cifar10", tmp_path)
    assert not list(cache.iterdir())


def test_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "file"))
    write_binary(tmp_path, MADE, packed=True)
    for _ in range(2):
        assert np.array_equal(load("cifar10", tmp_path).train.x.numpy(), MADE.train_x)
    assert caplog.text.count("cannot write the cache") == 1
    assert "FEDLESAM_CACHE" in caplog.text


def test_full_disk_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_binary(tmp_path, MADE, packed=True)
    monkeypatch.setattr(Path, "write_text", full)
    assert np.array_equal(load("cifar10", tmp_path).train.x.numpy(), MADE.train_x)
    assert "No space left" in caplog.text
    assert not list((cache / "data").iterdir())


def test_leftovers_are_swept(tmp_path: Path, cache: Path) -> None:
    left = cache / "data" / ".abc.def"
    fresh = cache / "data" / ".abc.ghi"
    for folder in (left, fresh):
        folder.mkdir(parents=True)
    os.utime(left, (0, 0))
    write_binary(tmp_path, MADE, packed=True)
    load("cifar10", tmp_path)
    assert not left.exists()
    assert fresh.exists()


def load_and_damage(folder: Path, cache: Path, said: Path) -> None:
    """What each of several processes does: decode the entry, and damage it now and then."""
    for i in range(20):
        with said.open("a") as lines:
            lines.write(prepare(source_of("cifar10", folder)).fingerprint + "\n")
        for path in cache.glob("data/*/test_y.bin") if i % 5 == 0 else ():
            # replaced, not truncated: another process may have it mapped
            beside = cache / f"damage{os.getpid()}"
            with contextlib.suppress(OSError):
                beside.write_bytes(b"damaged")
                beside.replace(path)


def test_processes_at_once(tmp_path: Path, cache: Path) -> None:
    """They decode, damage and mend the same entry over and over; each gets the right data every time."""
    write_binary(tmp_path, MADE, packed=True)
    said = [tmp_path / f"said{i}" for i in range(3)]
    started = [fork(functools.partial(load_and_damage, tmp_path, cache, path)) for path in said]
    assert [process.wait().code for process in started] == [0, 0, 0]
    wanted = load("cifar10", tmp_path).fingerprint
    lines = [line for path in said for line in path.read_text().split()]
    assert (len(lines), set(lines)) == (60, {wanted})


def test_an_array_that_shrinks_after_its_size_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may replace it between the two."""
    (tmp_path / "x.bin").write_bytes(b"short")
    real = Path.stat

    def larger(self: Path, **keywords: Any) -> Any:
        found = real(self, **keywords)
        return os.stat_result((*found[:6], 80, *found[7:])) if self.name == "x.bin" else found

    monkeypatch.setattr(Path, "stat", larger)
    with pytest.raises(Damaged, match=r"x\.bin"):
        _mapped(tmp_path, {"arrays": {"x": ("|u1", (80,))}})

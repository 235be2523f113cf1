"""Pictures of any size become one array, whatever the number of threads, and the cache is never in the way."""

import hashlib
import json
import logging
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from domain_files import SIDE, colour, expected, shades, write_domains, write_picture
from PIL import Image

from fedlesam.data import _pictures as module
from fedlesam.data import load
from fedlesam.data._load import load_domains
from fedlesam.data._pictures import load_pictures
from fedlesam.data.cache import discard
from fedlesam.data.formats import images


def test_the_middle_of_the_longer_side_is_kept() -> None:
    for turned in (False, True):
        wide = np.full((40, 120, 3), (200, 0, 0), np.uint8)
        wide[:, 40:80] = (0, 0, 200)
        picture = Image.fromarray(wide.transpose(1, 0, 2) if turned else wide)
        x = images.decode_any(as_png(picture), 40, "x")
        assert x.shape == (3, 40, 40)
        assert (x == np.array([0, 0, 200])[:, None, None]).all()
        assert images.decode_any(as_png(picture), 10, "x")[:, 5, 5].tolist() == [0, 0, 200]


def test_a_picture_of_the_right_size_is_left_as_it_is() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    assert np.array_equal(images.decode_any(as_png(Image.fromarray(pixels)), 30, "x"), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "CMYK", "LA"])
def test_all_modes_become_colour(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    x = images.decode_any(as_png(Image.new("RGB", (20, 10), (255, 255, 255)).convert(mode), kind), 16, "x")
    assert x.shape == (3, 16, 16)
    assert x.min() >= 250


def as_png(picture: Image.Image, kind: str = "PNG") -> bytes:
    import io

    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("threads", [1, 3])
def test_what_does_not_decode_is_named_skipped_and_counted(
    threads: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_domains(tmp_path, count=20)
    bad = {"ink/cat/000.png": b"", "oil/dog/007.png": b"no picture", "photo/dog/019.png": None}
    for name, content in bad.items():
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:45] if content is None else content)
    data = load_domains(f"domains:{tmp_path},size=12", threads=threads)
    lost = colour(0, 0, 0), colour(1, 1, 7), colour(2, 1, 19)
    wanted = [shade for shade in expected(3, 2, 20) if shade not in lost]
    assert shades(data) == wanted
    assert data.domains is not None
    kept = zip(shades(data), data.domains.of.tolist(), data.train.y.tolist(), strict=True)
    assert all(shade[:2] == colour(domain, label, 0)[:2] for shade, domain, label in kept), "still aligned"
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert all(any(m.startswith(f"skipped: {name}: does not decode") for m in messages) for name in bad)
    assert messages[-1] == f"{tmp_path}: 3 of 120 images are skipped"
    caplog.clear()
    again = load_domains(f"domains:{tmp_path},size=12")
    assert shades(again) == wanted
    assert "3 of 120 images are skipped" in caplog.text, "also when they come from the cache"


def test_nothing_decodes(tmp_path: Path) -> None:
    write_domains(tmp_path, count=1)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"x")
    with pytest.raises(ValueError, match="none of its 6 images decodes"):
        load(f"domains:{tmp_path}")


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.png"))


def test_the_number_of_threads_does_not_matter(tmp_path: Path, cache: Path) -> None:
    write_domains(tmp_path, count=20)
    rng = np.random.default_rng(1)
    for path in files(tmp_path):
        Image.fromarray(rng.integers(0, 256, (*rng.integers(5, 40, 2), 3), dtype=np.uint8)).save(path)
    found = []
    for threads in (1, 2, 3):
        found.append(load_pictures(tmp_path, files(tmp_path), 16, threads))
        (entry,) = (cache / "pictures").iterdir()
        discard(entry)
    assert not any(one.cached for one in found)
    assert all(np.array_equal(found[0].pixels, one.pixels) for one in found)
    assert len({one.checksum for one in found}) == 1


def test_several_threads_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other, so that one alone would not get on."""
    write_domains(tmp_path, count=20)
    both = threading.Barrier(2, timeout=60)
    met: set[int] = set()

    def stamped(data: bytes, size: int, where: str) -> np.ndarray:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            both.wait()
        return np.zeros((3, size, size), np.uint8)

    monkeypatch.setattr(images, "decode_any", stamped)
    load_pictures(tmp_path, files(tmp_path), 8, 2)
    assert len(met) == 2


def test_an_error_ends_the_decoding_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    write_domains(tmp_path, count=40)
    calls: list[str] = []

    def interrupted(data: bytes, size: int, where: str) -> np.ndarray:
        calls.append(where)
        if len(calls) == 1:
            raise KeyboardInterrupt
        time.sleep(0.02)
        return np.zeros((3, size, size), np.uint8)

    monkeypatch.setattr(images, "decode_any", interrupted)
    monkeypatch.setattr(module, "CHUNK", 1)
    with pytest.raises(KeyboardInterrupt):
        load_pictures(tmp_path, files(tmp_path), 8, 1)
    assert len(calls) < len(files(tmp_path)), "the rest is not decoded"
    assert not list((cache / "pictures").iterdir())


def test_the_cache_is_used_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_domains(tmp_path)
    first = load_pictures(tmp_path, files(tmp_path), SIDE)
    other = load_pictures(tmp_path, files(tmp_path), 2 * SIDE)
    assert (first.cached, other.cached) == (False, False)
    assert len(list((cache / "pictures").iterdir())) == 2
    monkeypatch.setattr(images, "decode_any", None)
    again = load_pictures(tmp_path, files(tmp_path), SIDE)
    assert again.cached
    assert isinstance(again.pixels, np.memmap)
    assert np.array_equal(first.pixels, again.pixels)


def test_a_changed_picture_is_decoded_again(tmp_path: Path) -> None:
    one = load(f"domains:{write_domains(tmp_path)},size=12")
    write_picture(tmp_path / "ink" / "cat" / "000.png", (250, 250, 250))
    two = load(f"domains:{tmp_path},size=12")
    assert shades(two)[0] == (250, 250, 250)
    assert shades(two)[1:] == shades(one)[1:]
    assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize("file", ["entry", "pixels.bin"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_a_damaged_cache_is_rebuilt(
    file: str, damage: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_domains(tmp_path)
    load(f"domains:{tmp_path},size=12")
    (entry,) = (cache / "pictures").iterdir()
    data = bytearray((entry / file).read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        (entry / file).unlink()
    else:
        (entry / file).write_bytes({"flip": data, "cut": data[:-1], "grow": data + b"x"}[damage])
    assert shades(load(f"domains:{tmp_path},size=12")) == expected(3, 2, 4)
    assert ("is damaged" in caplog.text) == ((file, damage) != ("entry", "remove"))


def test_an_entry_of_an_earlier_version_is_used(tmp_path: Path, cache: Path) -> None:
    """It named the shape of the pixels alone."""
    write_domains(tmp_path)
    load_pictures(tmp_path, files(tmp_path), SIDE)
    (entry,) = (cache / "pictures").glob("*/entry")
    facts = json.loads(entry.read_text().partition("\n")[2])
    text = json.dumps({**{k: v for k, v in facts.items() if k != "arrays"}, "shape": facts["arrays"]["pixels"][1]})
    entry.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    assert load_pictures(tmp_path, files(tmp_path), SIDE).cached


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_domains(tmp_path / "data", count=20)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "file"))
    assert shades(load_domains(f"domains:{tmp_path / 'data'},size=12", threads=2)) == expected(3, 2, 20)
    assert "the images are kept in memory" in caplog.text


def test_no_room_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_domains(tmp_path)
    free = namedtuple("free", "free")(100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr(module.os, "sysconf", lambda _: 50)
    with pytest.raises(ValueError, match=r"cannot write the cache .* too much for .* of RAM: .* limit= or size="):
        load(f"domains:{tmp_path},size=12")

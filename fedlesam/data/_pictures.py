"""Pictures of any size, decoded to one size by several threads and kept in a mapped file.

An entry of the cache is named by the hash of the pictures' files and by the size. As in `cache.py`, it is complete or
absent, and its pixels are hashed again whenever it is opened.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedlesam.data import cache
from fedlesam.data._files import Pixels, files_digest, read_bytes
from fedlesam.data.cache import Damaged
from fedlesam.data.formats import images

log = logging.getLogger(__name__)

VERSION = 1
"""Part of every key; to be raised when the decoder changes what it returns."""
CHUNK = 32
"""Pictures that a thread decodes at a time."""
SECONDS_BETWEEN_LINES = 0.5
NAMED = 20
"""Pictures that do not decode, named one by one."""

Files = Sequence[Path]


@dataclass(frozen=True)
class Pictures:
    pixels: Pixels
    """pictures x 3 x size x size, of those that decode, in the order of their files"""
    skipped: dict[int, str]
    """By their place among the files, those that do not decode, and why."""
    checksum: str
    """sha256 of the pixels"""
    cached: bool


def load_pictures(root: Path, files: Sequence[Path], size: int, threads: int | None = None) -> Pictures:
    """From the cache, or decoded and stored there. What does not decode is named, left out and counted.

    The number of threads does not change the result; None takes one per core, at most 8.
    """
    digest, found = files_digest(root, files), None
    folder = cache.entry_folder("pictures", f"pictures|{VERSION}|{size}|{digest}")
    try:
        found = _open(folder, digest)
    except Damaged as problem:
        log.warning("the cached pictures in %s are damaged (%s); they are decoded anew", folder, problem)
        cache.discard(folder)
    if found is None:
        found = _decode_and_store(folder, root, files, size, digest, threads or min(8, os.cpu_count() or 1))
        if files_digest(root, files) != digest:
            cache.discard(folder)
            raise ValueError(f"{root}: its files changed while they were read; wait until they are complete")
    _log_skipped(root, found.skipped, len(files))
    return found


def _log_skipped(root: Path, skipped: dict[int, str], files: int) -> None:
    count = len(skipped)
    for reason in list(skipped.values())[:NAMED]:
        log.warning("skipped: %s", reason)
    if count:
        log.warning("%s: %d of %d images %s skipped", root, count, files, "is" if count == 1 else "are")
    if count == files:
        raise ValueError(f"{root}: none of its {files} images decodes")


def _open(folder: Path, digest: str) -> Pictures | None:
    entry = cache.read_entry(folder)
    if entry is None:
        return None
    pixels = cache.mapped_array(folder / "pixels.bin", "|u1", entry["shape"])
    if entry["source"] != digest or _checksum(pixels) != entry["checksum"]:
        raise Damaged("its pixels do not match their checksum")
    return Pictures(pixels, {int(place): why for place, why in entry["skipped"].items()}, entry["checksum"], True)


def _checksum(pixels: Pixels) -> str:
    total = hashlib.sha256()
    for start in range(0, len(pixels), 1000):
        total.update(np.ascontiguousarray(pixels[start : start + 1000]).data.cast("B"))
    return total.hexdigest()


def _decode_and_store(folder: Path, root: Path, files: Files, size: int, digest: str, threads: int) -> Pictures:
    log.info("decoding %s images to %d x %d", f"{len(files):,}", size, size)
    with _rows(folder, (len(files), 3, size, size)) as (rows, beside):
        skipped = _decode(rows, root, files, size, threads)
        kept = [place for place in range(len(files)) if place not in skipped]
        for row, place in enumerate(kept) if skipped else ():
            rows[row] = rows[place]
        pixels = rows[: len(kept)]
        fresh = Pictures(pixels, skipped, _checksum(pixels), cached=False)
        if beside is None or not kept:
            return fresh
        entry = {"shape": pixels.shape, "checksum": fresh.checksum, "source": digest, "skipped": skipped}
        try:
            if isinstance(rows, np.memmap):
                rows.flush()
            os.truncate(beside / "pixels.bin", pixels.nbytes)
            cache.write_entry(beside, entry)
            with contextlib.suppress(OSError):  # another process was quicker
                beside.rename(folder)
            return replace(fresh, pixels=cache.mapped_array(folder / "pixels.bin", "|u1", list(pixels.shape)))
        except (OSError, Damaged) as error:
            reason = f"the decoded images cannot be kept there ({error}); set FEDLESAM_CACHE to a folder with room"
            raise ValueError(f"{folder.parent}: {reason}") from error


@contextlib.contextmanager
def _rows(folder: Path, shape: tuple[int, ...]) -> Iterator[tuple[Pixels, Path | None]]:
    """Room for the pixels: a mapped file in a temporary folder, or RAM where the cache has no room for it."""
    beside, needed = cache.temporary(folder), int(np.prod(shape))
    try:
        try:
            beside.mkdir(parents=True)
            cache.sweep(folder.parent)
            free = shutil.disk_usage(beside).free
            if needed > 0.95 * free:
                raise OSError(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
            rows: Pixels = np.memmap(beside / "pixels.bin", np.uint8, "w+", shape=shape)
            place: Path | None = beside
        except OSError as error:
            ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            why = f"cannot write the cache {folder.parent} ({error.strerror or error})"
            if needed > ram / 2:
                raise ValueError(
                    f"{why}, and the images need {needed / 1e9:.1f} GB, too much for {ram / 1e9:.1f} GB of RAM: set "
                    "FEDLESAM_CACHE to a folder with room, or ask for fewer or smaller ones with limit= or size="
                ) from error
            cache.warn_once(f"{why}; the images are kept in memory and decoded anew each time")
            rows, place = np.empty(shape, np.uint8), None
        yield rows, place
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _decode(rows: Pixels, root: Path, files: Sequence[Path], size: int, threads: int) -> dict[int, str]:
    """Fill the rows; the places that do not decode, and why. Pillow decodes and resizes without Python's lock."""

    def decode(start: int) -> dict[int, str]:
        skipped = {}
        for place in range(start, min(start + CHUNK, len(files))):
            name = files[place].relative_to(root).as_posix()
            try:
                rows[place] = images.decode_any(read_bytes(files[place]), size, name)
            except ValueError as problem:
                skipped[place] = str(problem)
        return skipped

    skipped: dict[int, str] = {}
    logged, starts, total = time.monotonic(), range(0, len(files), CHUNK), len(files)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for start, found in zip(starts, pool.map(decode, starts), strict=True):
                skipped |= found
                progress = {"done": min(start + CHUNK, total), "total": total, "unit": "images"}
                if time.monotonic() - logged > SECONDS_BETWEEN_LINES or progress["done"] == total:
                    logged = time.monotonic()
                    log.info("decoded %(done)s of %(total)s %(unit)s", progress, extra=progress)
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the rest
    return skipped

"""Pictures of any size, decoded to one size by several threads and kept in a mapped file.

An entry of the cache is named by the hash of the pictures' files and by the size. As in `cache.py`, it is complete or
absent, and its pixels are hashed again whenever it is opened.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedlesam.data import cache
from fedlesam.data._files import Pixels, files_digest, read_bytes
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


def load_pictures(root: Path, files: Files, size: int, threads: int | None = None) -> Pictures:
    """From the cache, or decoded and stored there. What does not decode is named, left out and counted.

    The number of threads does not change the result; None takes one per core, at most 8.
    """
    digest = files_digest(root, files)
    folder = cache.entry_folder("pictures", f"pictures|{VERSION}|{size}|{digest}")
    found = cache.open_entry(folder, digest, lambda arrays, facts: _checksum(arrays["pixels"]) == facts["checksum"])
    if found is not None:
        (pixels,), facts = found[0].values(), found[1]
        skipped = {int(place): why for place, why in facts["skipped"].items()}
        _log_skipped(root, skipped, len(files))
        return Pictures(pixels, skipped, facts["checksum"], cached=True)
    log.info("decoding %s images to %d x %d", f"{len(files):,}", size, size)
    shape, threads = (len(files), 3, size, size), threads or min(8, os.cpu_count() or 1)
    needed = math.prod(shape)
    try:
        with cache.room(folder, needed) as beside:
            rows = np.memmap(beside / "pixels.bin", np.uint8, "w+", shape=shape)
            fresh = _decoded(rows, root, files, digest, threads)
            rows.flush()
            os.truncate(beside / "pixels.bin", fresh.pixels.nbytes)
            facts = {"checksum": fresh.checksum, "source": digest, "skipped": fresh.skipped}
            return replace(fresh, pixels=cache.commit(beside, folder, {"pixels": fresh.pixels}, facts)["pixels"])
    except (OSError, cache.Damaged) as error:
        why, ram = cache.cannot_write(folder, error), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > ram / 2:
            raise ValueError(
                f"{why}, and the images need {needed / 1e9:.1f} GB, too much for {ram / 1e9:.1f} GB of RAM: set "
                "FEDLESAM_CACHE to a folder with room, or ask for fewer or smaller ones with limit= or size="
            ) from error
    cache.warn_once(f"{why}; the images are kept in memory and decoded anew each time")
    return _decoded(np.empty(shape, np.uint8), root, files, digest, threads)


def _decoded(rows: Pixels, root: Path, files: Files, digest: str, threads: int) -> Pictures:
    """The pictures in the first rows, those that do not decode left out."""
    skipped = _decode(rows, root, files, threads)
    _log_skipped(root, skipped, len(files))
    cache.check_unchanged(root, files, digest)
    kept = [place for place in range(len(files)) if place not in skipped]
    for row, place in enumerate(kept) if skipped else ():
        rows[row] = rows[place]
    return Pictures(rows[: len(kept)], skipped, _checksum(rows[: len(kept)]), cached=False)


def _log_skipped(root: Path, skipped: dict[int, str], files: int) -> None:
    count = len(skipped)
    for reason in list(skipped.values())[:NAMED]:
        log.warning("skipped: %s", reason)
    if count:
        log.warning("%s: %d of %d images %s skipped", root, count, files, "is" if count == 1 else "are")
    if count == files:
        raise ValueError(f"{root}: none of its {files} images decodes")


def _checksum(pixels: Pixels) -> str:
    total = hashlib.sha256()
    for start in range(0, len(pixels), 1000):
        total.update(np.ascontiguousarray(pixels[start : start + 1000]).data.cast("B"))
    return total.hexdigest()


def _decode(rows: Pixels, root: Path, files: Files, threads: int) -> dict[int, str]:
    """Fill the rows; the places that do not decode, and why. Pillow decodes and resizes without Python's lock."""

    def decode(start: int) -> dict[int, str]:
        skipped = {}
        for place in range(start, min(start + CHUNK, len(files))):
            name = files[place].relative_to(root).as_posix()
            try:
                rows[place] = images.decode_any(read_bytes(files[place]), rows.shape[-1], name)
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

"""Pictures of any size, decoded to one size by worker processes and kept in a mapped file.

An entry of the cache is named by the hash of the pictures' files and by the size, like those of `cache.py`: it is whole
or not there, and its pixels are hashed again whenever it is opened.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedlesam.data.cache import Damaged, cache_dir, discard, mapped_array, sweep, tell_once
from fedlesam.data.formats import images
from fedlesam.data.source import Pixels, files_digest, read_bytes

log = logging.getLogger(__name__)

VERSION = 1
"""Part of every key; to be raised when the decoder changes what it returns."""
CHUNK = 32
"""Pictures a worker process decodes at a time."""
SECONDS_BETWEEN_LINES = 0.5
NAMED = 20
"""Pictures that do not decode, named one by one."""


@dataclass(frozen=True)
class Pictures:
    pixels: Pixels
    """pictures x 3 x size x size, of those that decode, in the order of their files"""
    skipped: dict[int, str]
    """By their place among the files, those that do not decode, and why."""
    checksum: str
    """sha256 of the pixels"""
    source: str
    """Hash of the files."""
    cached: bool


def load_pictures(root: Path, files: Sequence[Path], size: int, processes: int | None = None) -> Pictures:
    """From the cache, or decoded and put there. What does not decode is named, left out and counted.

    The number of processes does not change the result; None takes one per core, at most 8.
    """
    digest = files_digest(root, files)
    key = hashlib.sha256(f"pictures|{VERSION}|{size}|{digest}".encode()).hexdigest()[:32]
    folder = cache_dir() / "pictures" / key
    found = None
    try:
        found = _open(folder, digest)
    except Damaged as problem:
        log.warning("the cached pictures in %s are damaged (%s); they are decoded anew", folder, problem)
        discard(folder)
    if found is None:
        found = _decode_and_store(folder, root, files, size, digest, _processes(processes, len(files)))
        if files_digest(root, files) != digest:
            discard(folder)
            raise ValueError(f"{root}: its files changed while they were read; wait until they are complete")
    _name_skipped(root, found, len(files))
    return found


def _processes(asked: int | None, files: int) -> int:
    """Pixels go through memory that is shared by a fork, which is safe and at hand on Linux only."""
    if sys.platform != "linux":
        return 1
    return max(1, min(asked or min(8, len(os.sched_getaffinity(0))), files // CHUNK))


def _name_skipped(root: Path, found: Pictures, files: int) -> None:
    for reason in list(found.skipped.values())[:NAMED]:
        log.warning("skipped: %s", reason)
    if found.skipped:
        count = len(found.skipped)
        log.warning("%s: %d of %d images %s skipped", root, count, files, "is" if count == 1 else "are")
    if len(found.skipped) == files:
        raise ValueError(f"{root}: none of its {files} images decodes")


def _open(folder: Path, digest: str) -> Pictures | None:
    try:
        check, _, text = (folder / "entry").read_text("utf-8").partition("\n")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(error) from error
    if hashlib.sha256(text.encode()).hexdigest() != check:
        raise Damaged("its description does not match its checksum")
    entry = json.loads(text)
    pixels = mapped_array(folder / "pixels.bin", "|u1", entry["shape"])
    if entry["source"] != digest or _checksum(pixels) != entry["checksum"]:
        raise Damaged("its pixels do not match their checksum")
    skipped = {int(place): reason for place, reason in entry["skipped"].items()}
    return Pictures(pixels, skipped, entry["checksum"], digest, cached=True)


def _checksum(pixels: Pixels) -> str:
    total = hashlib.sha256()
    for start in range(0, len(pixels), 1000):
        total.update(np.ascontiguousarray(pixels[start : start + 1000]).data.cast("B"))
    return total.hexdigest()


def _decode_and_store(
    folder: Path, root: Path, files: Sequence[Path], size: int, digest: str, processes: int
) -> Pictures:
    shape = (len(files), 3, size, size)
    log.info("decoding %s images to %d x %d", f"{len(files):,}", size, size)
    with _room(folder, int(np.prod(shape))) as (memory, beside):
        rows = np.frombuffer(memory, np.uint8).reshape(shape)
        skipped = _decode(rows, root, files, size, processes)
        kept = _move_up(rows, skipped)
        fresh = Pictures(rows[:kept], skipped, _checksum(rows[:kept]), digest, cached=False)
        if beside is None or not kept:
            return fresh
        entry = {"shape": fresh.pixels.shape, "checksum": fresh.checksum, "source": digest, "skipped": skipped}
        text = json.dumps(entry)
        try:
            memory.flush()
            os.truncate(beside / "pixels.bin", fresh.pixels.nbytes)
            (beside / "entry").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", "utf-8")
            with contextlib.suppress(OSError):  # another process was quicker
                beside.rename(folder)
            mapped = mapped_array(folder / "pixels.bin", "|u1", list(fresh.pixels.shape))
        except (OSError, Damaged) as error:
            raise ValueError(
                f"{folder.parent}: the decoded images cannot be kept there ({error}); set FEDLESAM_CACHE to a folder "
                "with room"
            ) from error
        return Pictures(mapped, skipped, fresh.checksum, digest, cached=False)


@contextlib.contextmanager
def _room(folder: Path, needed: int) -> Iterator[tuple[mmap.mmap, Path | None]]:
    """Memory that processes share: a file beside the entry's place, or RAM where the cache has no room for it."""
    beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        try:
            beside.mkdir(parents=True)
            sweep(folder.parent)
            if needed > 0.95 * shutil.disk_usage(beside).free:
                raise OSError(f"needs {needed / 1e9:.1f} GB, {shutil.disk_usage(beside).free / 1e9:.1f} GB are free")
            with (beside / "pixels.bin").open("wb+") as file:
                file.truncate(needed)
                memory = mmap.mmap(file.fileno(), needed)
            place: Path | None = beside
        except OSError as error:
            ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            why = f"cannot write the cache {folder.parent} ({error.strerror or error})"
            if needed > ram / 2:
                raise ValueError(
                    f"{why}, and the images need {needed / 1e9:.1f} GB, too much for {ram / 1e9:.1f} GB of RAM: set "
                    "FEDLESAM_CACHE to a folder with room, or ask for fewer or smaller ones with limit= or size="
                ) from error
            tell_once(f"{why}; the images are kept in memory and decoded anew each time")
            memory, place = mmap.mmap(-1, needed), None
        yield memory, place
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _move_up(rows: Pixels, skipped: dict[int, str]) -> int:
    """Close the gaps; the number of rows that count."""
    kept = 0
    for place in range(len(rows)) if skipped else ():
        if place not in skipped:
            if kept != place:
                rows[kept] = rows[place]
            kept += 1
    return kept if skipped else len(rows)


def _decode(rows: Pixels, root: Path, files: Sequence[Path], size: int, processes: int) -> dict[int, str]:
    starts = range(0, len(files), CHUNK)
    skipped: dict[int, str] = {}
    said = time.monotonic()
    for done, bad in enumerate(_chunks((rows, root, files, size), starts, processes), 1):
        skipped |= bad
        if time.monotonic() - said > SECONDS_BETWEEN_LINES or done == len(starts):
            said = time.monotonic()
            progress = {"done": min(done * CHUNK, len(files)), "total": len(files), "unit": "images"}
            log.info("decoded %(done)s of %(total)s %(unit)s", progress, extra=progress)
    return dict(sorted(skipped.items()))


Work = tuple[Pixels, Path, Sequence[Path], int]


def _chunks(work: Work, starts: range, processes: int) -> Iterator[dict[int, str]]:
    if processes == 1:
        yield from (_decode_chunk(work, start) for start in starts)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=fork, initializer=_begin, initargs=(work,)) as pool:
        try:
            for future in as_completed([pool.submit(_decode_mine, start) for start in starts]):
                yield future.result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{work[1]}: a process that decodes its images was killed; is there enough memory?"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_mine: Work | None = None


def _begin(work: Work) -> None:
    """In a worker process, which got the work by the fork and not through a pipe."""
    global _mine
    _mine = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _decode_mine(start: int) -> dict[int, str]:
    assert _mine is not None
    return _decode_chunk(_mine, start)


def _decode_chunk(work: Work, start: int) -> dict[int, str]:
    rows, root, files, size = work
    skipped = {}
    for place in range(start, min(start + CHUNK, len(files))):
        name = files[place].relative_to(root).as_posix()
        try:
            rows[place] = images.decode_any(read_bytes(files[place]), size, name)
        except ValueError as problem:
            skipped[place] = str(problem)
    return skipped

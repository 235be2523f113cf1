"""Files that are there whole or not at all, also after a power loss: written beside, synced, renamed."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PART = ".part"
"""How a file ends that is not finished; one that stays behind was cut off and means nothing."""


OURS = re.compile(r"\.?round\d{6,}[-.].*")
"""The names of files of a round, finished or not."""


@dataclass(frozen=True)
class FileDigest:
    """By which a file is known to be the one that was written."""

    size: int
    """In bytes."""
    sha256: str
    """In hexadecimal digits."""


class Damaged(ValueError):
    """A file is not what was written."""


def digest_of(path: Path) -> FileDigest:
    """The size and the SHA-256 of a file.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), digest)


def check_digest(path: Path, expected: FileDigest) -> None:
    """Raise Damaged for a file that is not the one that was written.

    Args:
        path: The file.
        expected: Its digest when it was written.
    """
    try:
        if path.stat().st_size == expected.size and digest_of(path) == expected:
            return
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror or error}") from error
    raise Damaged(f"{path}: is damaged")


Sync = bool | Literal["file"]
"""Whether a file must survive a power loss from now on; "file": its content, and whoever commits syncs its folder."""


@contextlib.contextmanager
def replacing(path: Path, sync: Sync = True, first: Iterable[Path] = ()) -> Iterator[Path]:
    """A name beside `path` to write to; what was written takes its place at the end, or leaves no trace.

    It gets the permissions of a file that `open` makes, whatever wrote it: safetensors' are the owner's alone.

    Args:
        path: The file to write or to replace.
        sync: Whether it must survive a power loss.
        first: Folders that are synced before it takes its place: after the file, whose sync has done their work by then
            where a file system has a journal.
    """
    make_folder(path.parent)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PART}")  # two processes may write one file at once
    try:
        beside.touch()
        usual = beside.stat().st_mode
        yield beside
        if beside.stat().st_mode != usual:
            beside.chmod(usual)
        if sync:
            sync_file(beside)
        for folder in first:
            sync_folder(folder)
        beside.replace(path)
        if sync is True:
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """A folder, and those it is in, lastingly.

    Args:
        path: The folder; it may be there already.
    """
    new = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync_folder(folder.parent)


def write_text(path: Path, content: str, first: Iterable[Path] = ()) -> None:
    """Write or replace a text file, whole or not at all.

    Args:
        path: The file.
        content: Its text; UTF-8.
        first: Folders that are synced before it takes its place.
    """
    with replacing(path, first=first) as beside:
        beside.write_text(content, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file, whole or not at all.

    Args:
        path: The file.
        content: All of it.
    """
    with replacing(path) as beside:
        beside.write_bytes(content)


def write_parts(path: Path, parts: Iterable[Any]) -> FileDigest:
    """Write a file piece by piece, and take its digest on the way; pieces are bytes, or arrays of them.

    Args:
        path: The file.
        parts: Its pieces, in their order.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=1 << 20) as file:
        for part in parts:
            digest.update(part)
            size += file.write(part)
    return FileDigest(size, digest.hexdigest())


def write_json(path: Path, content: object) -> None:
    """Write or replace a JSON file, whole or not at all.

    Args:
        path: The file.
        content: What `json.dumps` takes; NaN is refused.
    """
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def link(source: Path, path: Path, *, sync: bool = True) -> None:
    """The same file under a second name; a copy where the file system has no links.

    Args:
        source: The file.
        path: Its second name.
        sync: Whether the name must survive a power loss.
    """
    with replacing(path, sync) as beside:
        beside.unlink()
        try:
            os.link(source.resolve(), beside)  # of a link, what it leads to
        except OSError:
            shutil.copyfile(source, beside)


def collect(folder: Path, named: Collection[str]) -> None:
    """Delete the files of rounds in a folder that are not named; what a user put there stays.

    What cannot be deleted now is left for the next time.

    Args:
        folder: The folder.
        named: The names of the files to keep.
    """
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in named and OURS.fullmatch(path.name) and (path.is_symlink() or not path.is_dir()):
                with contextlib.suppress(OSError):
                    path.unlink()


def sync_file(path: Path) -> None:
    """Return when the disk has the contents of a file.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """A rename is only lasting once its folder is; file systems that cannot sync one do so by themselves.

    Args:
        path: The folder.
    """
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

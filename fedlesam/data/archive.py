"""Packed files, read in memory: nothing is ever extracted to disk, and nothing is believed before it is checked."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath, PureWindowsPath

from fedlesam.data.source import read_bytes

LIMIT = 2**30
"""No data set known here unpacks to more than a fifth of this."""
MEMBERS = 10_000

GZIP = b"\x1f\x8b"


def plain_bytes(path: Path, limit: int = LIMIT) -> bytes:
    """The contents of a file, unzipped to the last byte if it is gzipped, so that its checksum has been compared."""
    data = read_bytes(path)
    if not data.startswith(GZIP):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            plain = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: truncated or damaged ({error}); get it again") from error
    if len(plain) > limit:
        raise ValueError(f"{path}: unpacks to more than {limit:,} bytes; this is not the official file")
    return plain


def tar_members(path: Path, wanted: Collection[str], limit: int = LIMIT) -> dict[str, bytes]:
    """The files of a tar archive whose last name is in `wanted`, by that name.

    Every member is checked, wanted or not: an archive that tries to leave its folder is not what it claims to be.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(plain_bytes(path, limit)), mode="r:") as archive:
            for number, member in enumerate(archive):
                _check_member(path, number, member, limit)
                name = PurePosixPath(member.name).name
                if not member.isfile() or name not in wanted:
                    continue
                if name in found:
                    raise ValueError(f"{path}: holds {name!r} twice")
                file = archive.extractfile(member)
                data = file.read() if file is not None else b""
                if len(data) != member.size:
                    raise ValueError(f"{path}: {member.name!r} is cut short: {len(data):,} of {member.size:,} bytes")
                found[name] = data
    except ValueError:
        raise
    except Exception as error:  # tarfile raises many kinds for damaged headers
        raise ValueError(f"{path}: not a readable tar archive ({error}); get it again") from error
    return found


def _check_member(path: Path, number: int, member: tarfile.TarInfo, limit: int) -> None:
    name = member.name
    if number >= MEMBERS:
        raise ValueError(f"{path}: holds more than {MEMBERS:,} members; this is not the official file")
    windows = PureWindowsPath(name)
    if name.startswith("/") or windows.drive or windows.root or ".." in windows.parts:
        raise ValueError(f"{path}: member {name!r} leaves the archive's folder; refused, get the official file")
    if not (member.isfile() or member.isdir()):
        raise ValueError(f"{path}: member {name!r} is a link or a device; refused, get the official file")
    if not 0 <= member.size <= limit:
        raise ValueError(f"{path}: member {name!r} claims {member.size:,} bytes; refused, get the official file")

"""A file of JSON lines that only grows; on resume it is cut back to what the checkpoint knew."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedlesam.core.disk import Damaged, FileDigest
from fedlesam.core.space import cannot_write


class Journal:
    """Opened with `begin`, after `check`; a line that cannot be written whole is taken back.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._size = 0
        self._handle: int | None = None

    def check(self, seal: FileDigest) -> None:
        """That the file begins with what was sealed.

        Args:
            seal: Of the beginning of the file.
        """
        try:
            content = self.path.read_bytes()[: seal.size]
        except OSError as error:
            raise Damaged(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if FileDigest(len(content), hashlib.sha256(content).hexdigest()) != seal:
            raise Damaged(f"{self.path}: is damaged")

    def begin(self, seal: FileDigest | None = None) -> list[dict[str, Any]]:
        """Go on after what was sealed, and return it; without a seal, from nothing.

        Args:
            seal: Of the checkpoint that is resumed.
        """
        size = 0 if seal is None else seal.size
        content = self.path.read_bytes()[:size] if size else b""
        try:
            records = [json.loads(line) for line in content.splitlines()]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: is not a journal: {error}") from error
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(self._handle, size)
        self._digest, self._size = hashlib.sha256(content), size
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Write a line.

        Args:
            record: What JSON can hold.
        """
        assert self._handle is not None
        line = json.dumps(record).encode() + b"\n"
        try:
            written = os.pwrite(self._handle, line, self._size)
            if written < len(line):
                raise OSError(28, "no space is left", str(self.path))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise OSError(cannot_write("the record of a round", self.path.parent, error)) from error
        self._digest.update(line)
        self._size += len(line)

    def seal(self) -> FileDigest:
        """Of all that was written, which is made lasting."""
        assert self._handle is not None
        os.fsync(self._handle)
        return FileDigest(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Nothing more is written."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

"""What a power loss leaves: what was synced is kept in a ledger; what never was is gone, or half there."""

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from harness import Case


REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name)
    for name in (
        "fsync",
        "replace",
        "link",
        "unlink",
        "rmdir",
        "mkdir",
        "open",
        "ftruncate",
        "pwrite",
    )
}


Loss = Literal["nothing", "all", "some"]
"""What a power loss takes of what was not synced."""


def note_durable(case: "Case", handle: int) -> dict[str, list[int]]:
    """Copy what an open file or folder is now into the ledger; a folder's entries are returned."""
    about = os.fstat(handle)
    entries: dict[str, list[int]] = {}
    if stat.S_ISDIR(about.st_mode):
        with os.scandir(handle) as found:
            for entry in found:
                if about.st_ino != case.path.stat().st_ino or entry.name == case.run.name:
                    with contextlib.suppress(FileNotFoundError):
                        entries[entry.name] = [entry.inode(), int(entry.is_dir(follow_symlinks=False))]
        content = json.dumps(entries).encode()
    else:
        with open(f"/proc/self/fd/{handle}", "rb") as file:  # noqa: PTH123 - Path.open may be watched
            content = file.read()
    beside = case.ledger / f"{about.st_ino}.{os.getpid()}"
    with open(beside, "wb") as file:  # noqa: PTH123
        file.write(content)
    REAL["replace"](beside, case.ledger / str(about.st_ino))
    return entries


class Remains:
    """What a power loss leaves: of a folder the entries when it was last synced, of a file its bytes then.

    `all` that was not synced is gone. Of `some` each entry and each file may have made it to the disk all the same.
    """

    def __init__(self, case: "Case", loss: Loss) -> None:
        self.case, self.loss, self.rng = case, loss, case.rng
        self.now = {path.stat().st_ino: path for path in (case.run, *case.run.rglob("*"))}
        self.known: dict[int, bytes] = {}

    def of_folder(self, ino: int, now: Path | None, target: Path) -> None:
        ledger = self.case.ledger / str(ino)
        durable: dict[str, list[int]] = json.loads(ledger.read_bytes()) if ledger.exists() else {}
        current = {}
        if now is not None:
            for path in now.iterdir():
                if now != self.case.path or path == self.case.run:
                    current[path.name] = [path.stat().st_ino, int(path.is_dir())]
        for name in sorted({*durable, *current}):
            sides = [durable.get(name)] + ([current.get(name)] if self.loss == "some" else [])
            entry = self.rng.choice(sides)
            if entry is None:
                continue
            if entry[1]:
                (target / name).mkdir()
                self.of_folder(entry[0], self.now.get(entry[0]), target / name)
            else:
                (target / name).write_bytes(self.of_file(entry[0]))

    def of_file(self, ino: int) -> bytes:
        if ino not in self.known:
            ledger, now = self.case.ledger / str(ino), self.now.get(ino)
            current = now.read_bytes() if now is not None else b""
            torn = [b"", bytes(len(current)), current[: len(current) // 2]]
            sides = [ledger.read_bytes()] if ledger.exists() else torn
            self.known[ino] = self.rng.choice(sides + ([current] if self.loss == "some" and now is not None else []))
        return self.known[ino]

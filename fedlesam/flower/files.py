"""Files that are there whole or not at all, also after a crash."""

import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Written beside, synced, renamed, and the folder synced: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

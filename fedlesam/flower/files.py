"""Bytes into a file that is there whole or not at all."""

from pathlib import Path

from fedlesam.core.disk import replacing


def write(path: Path, content: bytes) -> None:
    with replacing(path) as beside:
        beside.write_bytes(content)

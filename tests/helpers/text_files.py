"""Small files of the data sets with natural clients and of texts, in the layouts that the readers expect."""

import gzip
import io
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

LINES = [
    "To be, or not to be: that is the question:",
    "Whether 'tis nobler in the mind to suffer",
    "The slings and arrows of outrageous fortune,",
    "Or to take arms against a sea of troubles,",
]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines, gzipped if the name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def speeches(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return ["\n".join(draw.choices(LINES, k=2)) for _ in range(count)]


def write_roles(root: Path, sizes: Mapping[str, int]) -> Path:
    """Roles with so many speeches of about 87 characters."""
    rows = [{"play": "Hamlet", "role": role, "speeches": speeches(i, n)} for i, (role, n) in enumerate(sizes.items())]
    return write_lines(root / "shakespeare" / "roles.jsonl.gz", rows)


def write_writers(
    root: Path, train: list[tuple[int, Any]], test: list[tuple[int, Any]], column: str = "writer"
) -> None:
    """Pairs (digit, writer); a picture's shade is its digit."""
    import pyarrow
    import pyarrow.parquet

    def picture(digit: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.full((28, 28), 20 * digit, np.uint8)).save(file, "PNG")
        return file.getvalue()

    root.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", train), ("test", test)):
        images = [{"bytes": picture(digit), "path": ""} for digit, _ in rows]
        table = {"img": images, "label": [digit for digit, _ in rows], column: [writer for _, writer in rows]}
        pyarrow.parquet.write_table(pyarrow.table(table), root / f"{part}.parquet")


def write_leaf(root: Path, train: Mapping[str, Any], test: Mapping[str, Any]) -> None:
    """LEAF's json; of the training part a file for every two users."""
    for part, users in (("train", train), ("test", test)):
        (root / part).mkdir(parents=True, exist_ok=True)
        names = list(users)
        for start in range(0, len(names), 2):
            chosen = names[start : start + 2]
            body = {
                "users": chosen,
                "num_samples": [len(users[name]["y"]) for name in chosen],
                "user_data": {name: users[name] for name in chosen},
            }
            (root / part / f"all_data_{start}.json").write_text(json.dumps(body))

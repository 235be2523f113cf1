"""Small data sets of several domains in their publishers' layouts. A picture's colour says what it is a picture of."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fedlesam.data import DataSet
from fedlesam.data.catalogue import DOMAIN_SETS

SIDE = 12


def colour(domain: int, label: int, number: int) -> tuple[int, int, int]:
    return 40 * domain + 5, label % 250, 10 * number + label // 250


def write_picture(path: Path, shade: tuple[int, int, int], size: tuple[int, int] = (SIDE, SIDE)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, shade).save(path, "PNG")


def write_domains(
    root: Path,
    domains: Sequence[str] = ("ink", "oil", "photo"),
    classes: Sequence[str] = ("cat", "dog"),
    count: int = 4,
) -> Path:
    for d, domain in enumerate(domains):
        for c, name in enumerate(classes):
            for i in range(count):
                write_picture(root / domain / name / f"{i:03}.png", colour(d, c, i))
    return root


def write_known(root: Path, name: str, count: int = 1) -> Path:
    known = DOMAIN_SETS[name]
    classes = [f"class{i:03}" for i in range(known.classes)]
    return write_domains(root, known.domains, classes, count)


def write_lists(root: Path, test: int = 1) -> None:
    """DomainNet's: of every class the first `test` images are in the test list. Labels run against the alphabet."""
    for domain in DOMAIN_SETS["domainnet"].domains:
        lines: dict[str, list[str]] = {"train": [], "test": []}
        classes = sorted(path.name for path in (root / domain).iterdir())
        for label, name in enumerate(reversed(classes)):
            for i, path in enumerate(sorted((root / domain / name).iterdir())):
                lines["test" if i < test else "train"].append(f"{domain}/{name}/{path.name} {label}")
        for part, content in lines.items():
            (root / f"{domain}_{part}.txt").write_text("\n".join(content) + "\n")


def colours(x: np.ndarray) -> list[tuple[int, ...]]:
    """Of pictures of one colour each."""
    assert (x == x[:, :, :1, :1]).all()
    return [tuple(int(value) for value in picture[:, 0, 0]) for picture in x]


def shades(data: DataSet) -> list[tuple[int, ...]]:
    return colours(data.train.x.numpy())


def expected(domains: int, classes: int, count: int) -> list[tuple[int, ...]]:
    return [colour(d, c, i) for d in range(domains) for c in range(classes) for i in range(count)]

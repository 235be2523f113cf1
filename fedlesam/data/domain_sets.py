"""Data sets of several domains: what is known of the public ones, and how a user asks for one. Cheap to import."""

from dataclasses import dataclass
from pathlib import Path

from fedlesam.names import unknown

SIZE = 224


@dataclass(frozen=True)
class DomainSet:
    name: str
    summary: str
    domains: tuple[str, ...]
    classes: int
    folders: tuple[str, ...]
    """Where its publishers' archives put the domains, below the folder they are extracted in."""
    lists: bool = False
    """Whether DOMAIN_train.txt and DOMAIN_test.txt say which images it has."""


DOMAIN_SETS = {
    known.name: known
    for known in (
        DomainSet(
            "pacs",
            "9,991 pictures of 7 classes in 4 domains: art_painting, cartoon, photo, sketch",
            ("art_painting", "cartoon", "photo", "sketch"),
            7,
            ("PACS", "kfold", "PACS/kfold"),
        ),
        DomainSet(
            "officehome",
            "15,588 pictures of 65 classes in 4 domains: Art, Clipart, Product, Real World",
            ("Art", "Clipart", "Product", "Real World"),
            65,
            ("OfficeHomeDataset_10072016", "OfficeHome"),
        ),
        DomainSet(
            "domainnet",
            "586,575 pictures of 345 classes in 6 domains: clipart, infograph, painting, quickdraw, real, sketch",
            ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
            345,
            ("DomainNet",),
            lists=True,
        ),
    )
}

PATTERN = "domains:PATH"
OPTIONS = {
    "size": f"pixels of a side [{SIZE}]",
    "limit": "at most so many images of a class in a domain",
    "lists": "domainnet: all [all], or official: train on the train lists, test on the left-out domain's test list",
}


@dataclass(frozen=True)
class Request:
    """A domain data set as it was asked for, e.g. `pacs:size=96,limit=100` or `domains:PATH,size=96`."""

    name: str
    known: DomainSet | None
    path: Path | None
    """None for a known one, which is looked for in the data folder."""
    size: int = SIZE
    limit: int | None = None
    official_lists: bool = False


def is_domains(name: str) -> bool:
    first = name.partition(":")[0]
    return first in DOMAIN_SETS or (first == "domains" and ":" in name)


def parse(name: str) -> Request:
    first, _, rest = name.partition(":")
    items = [item for item in rest.split(",") if item]
    count = len(items)
    while count and items[count - 1].partition("=")[0] in OPTIONS and "=" in items[count - 1]:
        count -= 1
    path = ",".join(items[:count])  # what is before the options, commas included
    options = dict(item.split("=", 1) for item in items[count:])
    known = DOMAIN_SETS.get(first)
    if known is not None and path:
        raise unknown(f"option of the data {first}:", path.partition("=")[0], OPTIONS)
    if known is None and not path:
        raise ValueError(f"data {name}: expected {PATTERN}, with images in PATH/DOMAIN/CLASS/")
    lists = options.get("lists", "all")
    if lists not in ("all", "official") or ("lists" in options and not (known and known.lists)):
        raise ValueError(f"data {name}: lists is all or official, and only domainnet has lists; got {lists!r}")
    return Request(
        name,
        known,
        None if known else Path(path).expanduser(),
        _count(name, "size", options, SIZE, at_least=8),
        _count(name, "limit", options) if "limit" in options else None,
        lists == "official",
    )


def _count(name: str, key: str, options: dict[str, str], default: int = 0, at_least: int = 1) -> int:
    text = options.get(key, str(default))
    if not text.isdecimal() or int(text) < at_least:
        raise ValueError(f"data {name}: {key} must be a whole number from {at_least}, got {text!r}")
    return int(text)


def plain(name: str) -> str:
    """For comparing names of domains: `Real World`, `real_world` and `RealWorld` are one."""
    return "".join(letter for letter in name.lower() if letter not in " _-")

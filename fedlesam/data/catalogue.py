"""Data sets by name. The facts are in `catalogue.toml`; torch and the readers are imported with the first data set."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlesam.core.names import unknown

if TYPE_CHECKING:
    from fedlesam.data.dataset import DataSet

DEFAULT_DIR = Path("data")
SIZE = 224
"""Pixels of a side to which images of domains are resized."""


@dataclass(frozen=True)
class Official:
    """A public data set of images of one size."""

    name: str
    """As users type it."""
    summary: str
    """In a few words."""
    classes: tuple[str, ...]
    """Their names, in the order of the labels."""
    shape: tuple[int, int, int]
    """channels, height, width"""
    train: int
    """Training images; the test images are 10,000 of all of them."""
    mean: tuple[float, ...]
    """Per channel, of x / 255."""
    std: tuple[float, ...]
    """The standard deviation, likewise."""
    base_url: str
    """Where its publishers, or a mirror, offer the files."""
    fetched: tuple[str, ...]
    """The files that `fetch` gets, each at base_url + its name."""
    md5: dict[str, str]
    """Of every packed file that its publishers offer."""
    plain_md5: dict[str, str] = field(default_factory=dict)
    """Of the contents of gzipped files, which others compress again."""
    flip_and_crop: bool = False
    """The paper's augmentation."""


@dataclass(frozen=True)
class DomainSet:
    """A public data set of several domains."""

    name: str
    """As users type it."""
    summary: str
    """In a few words."""
    domains: tuple[str, ...]
    """Their names."""
    classes: int
    """How many there are."""
    folders: tuple[str, ...]
    """Where its publishers' archives put the domains, below the folder they are extracted in."""
    pictures: tuple[int, ...]
    """How many there are in each domain."""
    lists: bool = False
    """Whether DOMAIN_train.txt and DOMAIN_test.txt name its images."""


@dataclass(frozen=True)
class FileSet:
    """A data set that is read from a user's files: texts, or samples with natural clients."""

    name: str
    """As users type it."""
    summary: str
    """In a few words."""
    reader: str
    """The module of `formats` that reads it."""
    files: str
    """What is looked for, for people."""
    folders: tuple[str, ...] = ()
    """Where, below the data folder; of a path that the user names, nowhere."""
    options: dict[str, int] = field(default_factory=dict)
    """Whole numbers that may follow the name, with their defaults."""
    classes: tuple[str, ...] = ()
    """Their names, in the order of the labels; empty where the files say them."""
    client: str = ""
    """The column that names the client."""
    shape: tuple[int, ...] = ()
    """Of a picture; empty for texts."""
    train: int = 0
    """Training samples, with the defaults of the options; 0 where the files say it."""
    test: int = 0
    """Test samples, likewise."""
    clients: int = 0
    """Natural clients, likewise."""


_FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _fields(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}


OFFICIAL = {name: Official(name, **_fields(facts)) for name, facts in _FACTS["official"].items()}
DOMAIN_SETS = {name: DomainSet(name, **_fields(facts)) for name, facts in _FACTS["domains"].items()}
FILE_SETS = {name: FileSet(name, **_fields(facts)) for name, facts in _FACTS["files"].items()}
PATHS = {name: FileSet(name, **_fields(facts)) for name, facts in _FACTS["paths"].items()}
"""The same, in a folder that the user names: `leaf:PATH`, `texts:PATH`."""

EMBEDDED = {"digits": "1,797 handwritten digits, 8 x 8; embedded, no download"}

NAMES: dict[str, str] = (
    EMBEDDED
    | {name: known.summary for name, known in OFFICIAL.items()}
    | {name: known.summary for name, known in DOMAIN_SETS.items()}
    | {name: known.summary for name, known in FILE_SETS.items()}
    | {f"{name}:PATH": known.summary for name, known in PATHS.items()}
    | _FACTS["patterns"]
)
"""The names and patterns that `load` and `--data` take, with a line on each."""

SCHEMES: dict[str, str] = _FACTS["schemes"]
"""What `split` and `--split` take, with a line on each."""

OPTIONS = {
    "size": f"height and width in pixels [{SIZE}]",
    "limit": "at most this number of images of each class in each domain",
    "lists": "domainnet: all [all], or official: train on the train lists, test on the left-out domain's test list",
}
"""What can follow the name of a data set with domains."""

MOST = 1_000_000
"""Of such an option."""

FILE_OPTIONS: dict[str, str] = _FACTS["options"]
"""What can follow the name of a data set of `FILE_SETS` and `PATHS`."""


class FilesNotFound(ValueError):
    """A data set is nowhere in the folders that are searched; one that is damaged or incomplete is another error."""


@dataclass(frozen=True)
class Request:
    """A domain data set as the user named it, e.g. `pacs:size=96,limit=100` or `domains:PATH,size=96`."""

    name: str
    """As the user typed it."""
    known: DomainSet | None
    """The public data set; None for one of the user's own."""
    path: Path | None
    """None for a known one, which is searched in the data folder."""
    size: int = SIZE
    """Of the square images, in pixels."""
    limit: int | None = None
    """The most images of a class in a domain; None for all."""
    official_lists: bool = False
    """Whether the publishers' lists say which images are for tests."""


@dataclass(frozen=True)
class FileRequest:
    """A data set in files as the user named it, e.g. `shakespeare:stride=1` or `texts:PATH,length=64`."""

    name: str
    """As the user typed it."""
    known: FileSet
    """The kind of data set."""
    path: Path | None
    """None for one that is searched in the data folder."""
    options: dict[str, int]
    """All options, with the user's values."""

    @property
    def kind(self) -> str:
        """Of what is decoded: the data set and its options."""
        return f"{self.known.name}{sorted(self.options.items())}"


def load(name: str, data_dir: Path | str | None = None) -> "DataSet":
    """Load a data set by name. It is decoded once; later loads map the decoded arrays from the cache.

    Args:
        name: One of `NAMES`: `digits`, `cifar10`, `pacs:size=96`, `folder:PATH`, `module:callable`, ...
        data_dir: The folder of the files. Default: `./data`, then the system's data set packages.

    Returns:
        The data set.

    Raises:
        FilesNotFound: The files are not there; the message names the remedy.
        ValueError: The name is not known, or the files are damaged or incomplete; the message says it, too.
    """
    from fedlesam.data import _load, _own

    folder = Path(data_dir) if data_dir is not None else None
    if name in EMBEDDED:
        return _load.load_digits()
    if name.startswith("features:"):
        from fedlesam.data import features

        return features.read(Path(name.removeprefix("features:")).expanduser())
    if is_domains(name):
        return _load.load_domains(name, folder)
    if is_files(name):
        return _load.from_source(name, _load.source_of(name, folder))
    if is_own(name):
        return _own.load_own(name)
    return _load.from_source(name, _load.source_of(name, folder))


def is_domains(name: str) -> bool:
    """Whether a name stands for a data set with domains.

    Args:
        name: As for `load`.
    """
    first = name.partition(":")[0]
    return first in DOMAIN_SETS or (first == "domains" and ":" in name)


def is_own(name: str) -> bool:
    """Whether a name reads as `module:callable`.

    Args:
        name: As for `load`.
    """
    return ":" in name and not name.startswith(("folder:", "features:")) and not (is_domains(name) or is_files(name))


def is_files(name: str) -> bool:
    """Whether a name stands for a data set of `FILE_SETS`, or for a folder of `PATHS`.

    Args:
        name: As for `load`.
    """
    first, colon, _ = name.partition(":")
    return first in FILE_SETS or (first in PATHS and bool(colon))


def parse_files(name: str) -> FileRequest:
    """Parse the name of a data set in files and its options.

    Args:
        name: `NAME[:OPTION=VALUE,...]` or `leaf:PATH[,OPTION=VALUE,...]`; a path may hold commas.

    Raises:
        ValueError: An option or its value is not known.
    """
    first, _, rest = name.partition(":")
    known = FILE_SETS.get(first) or PATHS[first]
    path, options = _path_and_options(rest, FILE_OPTIONS)
    unfit = [key for key in options if key not in known.options]
    if (first in FILE_SETS and path) or unfit:
        wrong = unfit[0] if unfit else path.partition("=")[0]
        takes = ", ".join(known.options) or "none"
        raise ValueError(f"data {name}: unknown option {wrong!r}; {first} takes {takes}")
    if first in PATHS and not path:
        raise ValueError(f"data {name}: expected {first}:PATH, a folder with {known.files}")
    for key, value in options.items():
        if not (value.isdecimal() and len(value) < 8 and 1 <= int(value) <= MOST):
            raise ValueError(f"data {name}: {key} must be a whole number from 1 to {MOST:,}, got {value!r}")
    numbers = {**known.options, **{key: int(value) for key, value in options.items()}}
    return FileRequest(name, known, Path(path).expanduser() if first in PATHS else None, numbers)


def _path_and_options(text: str, known: Iterable[str]) -> tuple[str, dict[str, str]]:
    """`PATH,key=value,...`: a path may hold commas, so that options are read from the end."""
    items = [item for item in text.split(",") if item]
    count = len(items)
    while count and items[count - 1].partition("=")[0] in known and "=" in items[count - 1]:
        count -= 1
    return ",".join(items[:count]), dict(item.split("=", 1) for item in items[count:])


def fetch_hint(name: str, folder: object) -> str:
    """The remedy for a file that is missing or damaged.

    Args:
        name: Of the data set.
        folder: Where its files should be.
    """
    return f"get it with `fedlesam data fetch {name} --data-dir {folder}`"


def parse_domains(name: str) -> Request:
    """Parse the name of a data set with domains and its options.

    Args:
        name: `NAME[:OPTION=VALUE,...]` or `domains:PATH[,OPTION=VALUE,...]`; a path may hold commas.

    Raises:
        ValueError: An option or its value is not known.
    """
    first, _, rest = name.partition(":")
    path, options = _path_and_options(rest, OPTIONS)
    known = DOMAIN_SETS.get(first)
    if known is not None and path:
        raise unknown(f"option of the data {first}:", path.partition("=")[0], OPTIONS)
    if known is None and not path:
        raise ValueError(f"data {name}: expected domains:PATH, with images in PATH/DOMAIN/CLASS/")
    lists = options.get("lists", "all")
    if lists not in ("all", "official") or ("lists" in options and not (known and known.lists)):
        raise ValueError(f"data {name}: lists is all or official, and only domainnet has lists; got {lists!r}")
    for key, least in (("size", 8), ("limit", 1)):
        if key in options and not (options[key].isdecimal() and int(options[key]) >= least):
            raise ValueError(f"data {name}: {key} must be a whole number from {least}, got {options[key]!r}")
    folder = None if known else Path(path).expanduser()
    numbers = {key: int(options[key]) for key in ("size", "limit") if key in options}
    return Request(name, known, folder, **numbers, official_lists=lists == "official")


def plain(name: str) -> str:
    """For comparing names of domains: `Real World`, `real_world` and `RealWorld` are one.

    Args:
        name: As a folder or a user spells it.
    """
    return "".join(letter for letter in name.lower() if letter not in " _-")

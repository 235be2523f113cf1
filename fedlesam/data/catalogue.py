"""Data sets by name. Cheap to import: torch and the readers are loaded with the first data set."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedlesam.data.domain_sets import DOMAIN_SETS, PATTERN, is_domains
from fedlesam.data.official import OFFICIAL
from fedlesam.names import unknown

if TYPE_CHECKING:
    from fedlesam.data.dataset import DataSet
    from fedlesam.data.source import Source

EMBEDDED = {"digits": "1,797 handwritten digits, 8 x 8; embedded, no download"}

PATTERNS = {
    PATTERN: "your images in PATH/DOMAIN/CLASS/, of any size; they are resized",
    "folder:PATH": "your images in PATH/train/CLASS/ and PATH/test/CLASS/, all of one size",
    "module:callable": "your function that returns a DataSet, or ((x, y), (x, y)) tensors",
}

NAMES: dict[str, str] = (
    EMBEDDED
    | {name: known.summary for name, known in OFFICIAL.items()}
    | {name: known.summary for name, known in DOMAIN_SETS.items()}
    | PATTERNS
)
"""What can be typed after --data, with a line on each."""


def load(name: str, data_dir: Path | None = None) -> "DataSet":
    """A data set by name, decoded once and from then on mapped from the cache.

    Without `data_dir` the folder ./data and the system's data set packages are looked at.
    """
    from fedlesam.data.digits import load_digits
    from fedlesam.data.domains import load_domains
    from fedlesam.data.own import load_own

    if name in EMBEDDED:
        return load_digits()
    if is_domains(name):
        return load_domains(name, data_dir)
    if is_own(name):
        return load_own(name)
    return from_source(name, source_of(name, data_dir))


def is_own(name: str) -> bool:
    """Whether it is `module:callable`."""
    return ":" in name and not name.startswith("folder:") and not is_domains(name)


def source_of(name: str, data_dir: Path | None) -> "Source":
    """Where a named or folder data set lies; a ValueError if it is not there or the name is not known."""
    from fedlesam.data.find import find
    from fedlesam.data.formats import folders

    if name.startswith("folder:"):
        return folders.source(Path(name.removeprefix("folder:")).expanduser())
    if name not in OFFICIAL:
        raise unknown("data", name, NAMES)
    return find(OFFICIAL[name], data_dir)


def from_source(name: str, source: "Source") -> "DataSet":
    import numpy as np
    import torch

    from fedlesam.data.augment import flip_and_crop
    from fedlesam.data.cache import prepare
    from fedlesam.data.dataset import DataSet, Images

    prepared = prepare(source)
    known = OFFICIAL.get(name)
    part: Callable[[str], Images] = lambda which: Images(  # noqa: E731
        *(torch.from_numpy(np.require(prepared.arrays.named()[f"{which}_{axis}"], requirements="W")) for axis in "xy")
    )
    return DataSet(
        name=name,
        train=part("train"),
        test=part("test"),
        classes=prepared.arrays.classes,
        mean=known.mean if known else prepared.mean,
        std=known.std if known else prepared.std,
        augment=flip_and_crop if known and known.flip_and_crop else None,
        fingerprint=prepared.fingerprint,
    )

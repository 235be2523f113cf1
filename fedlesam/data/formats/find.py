"""Find an official data set in a folder, in whichever form it is there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from fedlesam.data._files import Source
from fedlesam.data.catalogue import DEFAULT_DIR, FileRequest, FilesNotFound, Official, fetch_hint
from fedlesam.data.formats import cifar, folders, idx, leaf, parquet, shakespeare, texts, writers

PACKAGED = Path("/usr/share/datasets")
"""Where Debian's dataset packages install; searched when no folder is given."""

_TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}


def _roots(known: Official, data_dir: Path | None) -> list[Path]:
    """The folders that are searched, in order."""
    folder = Path(data_dir if data_dir is not None else DEFAULT_DIR).expanduser()
    found = [folder, folder / known.name]
    if known.name in _TORCHVISION:
        found += [folder / "raw", folder / _TORCHVISION[known.name]]
    return found + ([PACKAGED / known.name] if data_dir is None else [])


def _forms(known: Official, places: list[Path]) -> Iterator[Source]:
    """Official files before parquet before class folders; of CIFAR, the binary version before the pickles."""
    for reader in (cifar if known.name.startswith("cifar") else idx, parquet, folders):
        found = [source for root in places for source in reader.find(known, root)]
        yield from sorted(found, key=lambda source: source.form.startswith("python"))


def find(known: Official, data_dir: Path | None) -> list[Source]:
    """Every complete form, the preferred one first, or a ValueError that lists what was searched where.

    Args:
        known: The data set.
        data_dir: The user's data folder; None for the default.
    """
    places = _roots(known, data_dir)
    found: list[Source] = []
    try:
        for source in _forms(known, places):
            found.append(source)
    except ValueError:
        if all(source.missing for source in found):  # else another form is there
            raise
    if complete := [source for source in found if not source.missing]:
        return complete
    hint = fetch_hint(known.name, data_dir if data_dir is not None else DEFAULT_DIR)
    for partial in found:
        names = ", ".join(map(str, partial.missing[:5])) + (", ..." if len(partial.missing) > 5 else "")
        raise ValueError(f"{known.name}: the {partial.form} in {partial.root} is incomplete: missing {names}; {hint}")
    raise FilesNotFound(
        f"{known.name}: not found in {', '.join(map(str, places))} (looked for {_looked_for(known)}); {hint}"
    )


class Reader(Protocol):
    """A module that reads a data set of files."""

    def find(self, request: FileRequest, root: Path) -> Source | None:
        """The data set in a folder; None if it is not there.

        Args:
            request: What the user asked for.
            root: The folder that is searched.
        """


READERS: dict[str, Reader] = {"leaf": leaf, "shakespeare": shakespeare, "texts": texts, "writers": writers}


def find_files(request: FileRequest, data_dir: Path | None) -> Source:
    """The first folder that has the files of a data set; a ValueError says what to put where.

    Args:
        request: What the user asked for.
        data_dir: The data folder.
    """
    known, base = request.known, Path(data_dir if data_dir is not None else DEFAULT_DIR).expanduser()
    places = [request.path] if request.path is not None else [base, *(base / folder for folder in known.folders)]
    found = [source for root in places if (source := READERS[known.reader].find(request, root)) is not None]
    for source in found:
        if not source.missing:
            return source
    for source in found:
        raise ValueError(f"{request.name}: {source.root} is incomplete: missing {', '.join(map(str, source.missing))}")
    where, there = request.path or base / known.folders[0], ", ".join(map(str, places))
    raise FilesNotFound(f"{request.name}: not found in {there}, and not downloaded; put {known.files} into {where}")


def _looked_for(known: Official) -> str:
    packed = " ".join(name.removesuffix(".gz") for name in known.fetched) + ", gzipped or not"
    if known.name.startswith("cifar"):
        packed = f"{' or '.join(known.md5)} or their folders"
    return f"{packed}; train.parquet and test.parquet; train/CLASS/image and test/CLASS/image"

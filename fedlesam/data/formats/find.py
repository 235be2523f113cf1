"""Find an official data set in a folder, in whichever form it is there."""

from collections.abc import Iterator
from pathlib import Path

from fedlesam.data._files import Source
from fedlesam.data.catalogue import DEFAULT_DIR, Official, fetch_hint
from fedlesam.data.formats import cifar, folders, idx, parquet

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
    """Every complete form, the preferred one first, or a ValueError that lists what was searched where."""
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
    raise ValueError(
        f"{known.name}: not found in {', '.join(map(str, places))} (looked for {_looked_for(known)}); {hint}"
    )


def _looked_for(known: Official) -> str:
    packed = " ".join(name.removesuffix(".gz") for name in known.fetched) + ", gzipped or not"
    if known.name.startswith("cifar"):
        packed = f"{' or '.join(known.md5)} or their folders"
    return f"{packed}; train.parquet and test.parquet; train/CLASS/image and test/CLASS/image"

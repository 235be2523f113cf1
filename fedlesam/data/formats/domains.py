"""Images by domain and class, ROOT/DOMAIN/CLASS/image, listed and checked but not read; DomainNet's list files."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedlesam.data._files import Labels, read_bytes
from fedlesam.data.catalogue import DEFAULT_DIR, DomainSet, FilesNotFound, Request, plain
from fedlesam.data.formats import folders

log = logging.getLogger(__name__)

SHOWN = 8
"""Names in an error."""


@dataclass(frozen=True)
class Listed:
    """Images of several domains, domain by domain, class by class, in the order of their names."""

    form: str
    """How the images are laid out, for messages."""
    root: Path
    """The folder that holds them."""
    domains: tuple[str, ...]
    """Their names, in the order of `domain`."""
    classes: tuple[str, ...]
    """Their names, in the order of `label`."""
    files: tuple[Path, ...]
    """Of the images."""
    label: Labels
    """The class of each image."""
    domain: Labels
    """The domain of each image."""
    test: npt.NDArray[np.bool_] | None = None
    """Which images stand in the official test lists, where those are to be followed."""


_Groups = dict[tuple[str, int, bool], list[Path]]
"""The images by domain, class number, and whether they are in a test list."""


def find(request: Request, data_dir: Path | None) -> Listed:
    """What there is of the data set that was asked for; a ValueError shows what was found instead.

    Args:
        request: What the user asked for.
        data_dir: The user's data folder; None for the default.
    """
    if request.path is not None:
        return _from_folders(request, request.path, _folders(request.path))
    assert request.known is not None
    root, found = _locate(request.known, data_dir)
    lists = [f"{domain}_{part}.txt" for domain in request.known.domains for part in ("train", "test")]
    there = [name for name in lists if (root / name).is_file()]
    if not (request.known.lists and (there or request.official_lists)):
        return _from_folders(request, root, found)
    if missing := [name for name in lists if name not in there]:
        raise ValueError(
            f"{root}: of the list files of {request.known.name} {_some(missing)} are missing; found {_some(there)}. "
            "Add them; without any list file the folders are read"
        )
    return _from_lists(request, root)


def _locate(known: DomainSet, data_dir: Path | None) -> tuple[Path, dict[str, Path]]:
    base = Path(data_dir if data_dir is not None else DEFAULT_DIR).expanduser()
    places = [place / below for place in (base, base / known.name) for below in ("", *known.folders)]
    wanted = {plain(domain): domain for domain in known.domains}
    named = [{plain(name): path for name, path in _folders(root).items() if plain(name) in wanted} for root in places]
    root, best = max(zip(places, named, strict=True), key=lambda place: len(place[1]))
    found = {wanted[name]: path for name, path in best.items()}
    missing = [domain for domain in known.domains if domain not in found]
    if not found:
        raise FilesNotFound(
            f"{known.name}: not found in {', '.join(map(str, dict.fromkeys(places)))} (looked for the folders "
            f"{', '.join(known.domains)} with CLASS/image in each); get it from its publishers and name its folder "
            "with --data-dir"
        )
    if missing:
        raise ValueError(
            f"{root}: of the domains of {known.name} {', '.join(missing)} is missing; found {_some(list(found))}. "
            f"Add it, or take what is there with --data domains:{root}"
        )
    return root, {domain: found[domain] for domain in known.domains}


def _folders(root: Path) -> dict[str, Path]:
    try:
        return {path.name: path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")}
    except OSError:
        return {}


def _from_folders(request: Request, root: Path, domains: dict[str, Path]) -> Listed:
    if len(domains) < 2:
        raise ValueError(
            f"{root}: holds {len(domains)} folders ({_some(list(domains)) or 'none'}); expected at least two domains, "
            f"{root}/DOMAIN/CLASS/image"
        )
    found = {name: folders.listing(path) for name, path in domains.items()}
    classes = sorted({name for listing in found.values() for name in listing})
    groups: _Groups = {}
    for domain, listing in found.items():
        if missing := [name for name in classes if name not in listing]:
            raise ValueError(
                f"{domains[domain]}: the class folders {_some(missing)} are missing, which other domains have; found "
                f"{_some(list(listing))}"
            )
        groups |= {(domain, number, False): listing[name] for number, name in enumerate(classes)}
    _check_classes(request, root, classes)
    return _listed(request, "domain folders", root, tuple(found), tuple(classes), groups)


def _check_classes(request: Request, root: Path, classes: Sequence[str]) -> None:
    if request.known is not None and len(classes) != request.known.classes:
        raise ValueError(
            f"{root}: {request.known.name} has {request.known.classes} classes, found {len(classes)}: "
            f"{_some(list(classes))}. A selection of classes loads as domains:{root}"
        )


def _from_lists(request: Request, root: Path) -> Listed:
    """A line is `DOMAIN/CLASS/name.jpg LABEL`."""
    assert request.known is not None
    names: dict[int, str] = {}
    groups: _Groups = {}
    for domain in request.known.domains:
        for test in (False, True):
            path = root / f"{domain}_{'test' if test else 'train'}.txt"
            for file, label in _lines(path, domain):
                if names.setdefault(label, file.parts[1]) != file.parts[1]:
                    raise ValueError(f"{path}: {file} has label {label}, which is {names[label]} elsewhere")
                groups.setdefault((domain, label, test), []).append(root / file)
    classes = tuple(names[label] for label in sorted(names))
    if sorted(names) != list(range(len(classes))) or len(set(classes)) < len(classes):
        raise ValueError(f"{root}: the labels of the list files are not 0 to {len(classes) - 1}, one for each class")
    _check_classes(request, root, classes)
    for domain in request.known.domains:
        missing = [name for label, name in enumerate(classes) if (domain, label, False) not in groups]
        if missing:  # the lists are the authority, so this is no error as it is with folders
            log.warning("%s/%s_train.txt: has no image of %s, which other domains have", root, domain, _some(missing))
    absent = [path for files in groups.values() for path in files if not path.is_file()]
    if absent:
        raise ValueError(
            f"{root}: {len(absent):,} images of the list files are not there, e.g. {absent[0]}; extract all archives"
        )
    order = request.known.domains
    groups = dict(sorted(groups.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])))
    return _listed(request, "list files", root, request.known.domains, classes, groups)


def _lines(path: Path, domain: str) -> Iterator[tuple[Path, int]]:
    for number, line in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        file = Path(name)
        if len(file.parts) != 3 or file.parts[0] != domain or ".." in file.parts or not label.isdecimal():
            raise ValueError(f"{path}, line {number}: {line.strip()[:80]!r}; expected {domain}/CLASS/IMAGE LABEL")
        yield file, int(label)


def _listed(
    request: Request, form: str, root: Path, domains: tuple[str, ...], classes: tuple[str, ...], groups: _Groups
) -> Listed:
    if not request.official_lists:  # one limit for both lists
        joined: _Groups = {}
        for (domain, label, _), files in groups.items():
            joined.setdefault((domain, label, False), []).extend(files)
        groups = joined
    chosen = [_spread(sorted(files), request.limit) for files in groups.values()]
    described = np.array([(label, domains.index(domain), test) for domain, label, test in groups], np.int64)
    label, domain, test = np.repeat(described, [len(files) for files in chosen], axis=0).T.copy()
    images = tuple(path for files in chosen for path in files)
    listed = test.astype(bool) if request.official_lists else None
    return Listed(form, root, domains, classes, images, label, domain, listed)


def _spread(files: list[Path], limit: int | None) -> list[Path]:
    """At most `limit` of them, evenly spaced, since neighbours by name are often alike."""
    count = len(files) if limit is None else min(limit, len(files))
    return [files[i * len(files) // count] for i in range(count)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

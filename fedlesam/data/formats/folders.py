"""Class folders of images: ROOT/train/CLASS/image and ROOT/test/CLASS/image."""

from functools import partial
from pathlib import Path

import numpy as np

from fedlesam.data._files import Arrays, Part, Source, check_all_classes, read_bytes
from fedlesam.data.catalogue import Official
from fedlesam.data.formats import images

Listing = dict[str, list[Path]]
"""class -> its images, both in the order of their names"""


def listing(part: Path) -> Listing:
    """Hidden files and files that are not images by their suffix are passed over; a folder in a class is refused.

    Args:
        part: The folder of one part, with a folder for each class.
    """
    if not part.is_dir():
        raise ValueError(f"{part}: no such folder; expected {part.parent}/train/CLASS/image and test/CLASS/image")
    classes: Listing = {}
    for folder in sorted(part.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
        for nested in filter(Path.is_dir, entries):
            raise ValueError(f"{nested}: a folder inside a class; put its images into {folder}")
        classes[folder.name] = [entry for entry in entries if entry.suffix.lower() in images.SUFFIXES]
        if not classes[folder.name]:
            kinds = " ".join(images.SUFFIXES)
            raise ValueError(f"{folder}: a class without images ({kinds}); add some or remove the folder")
    if not classes:
        raise ValueError(f"{part}: holds no class folders; expected {part}/CLASS/image")
    return classes


def _shape(paths: tuple[Path, ...]) -> tuple[int, int, int]:
    """Of all images: grey only if every one is. A ValueError names the first of another size."""
    first = images.header(read_bytes(paths[0]), str(paths[0]))
    grey = True
    for path in paths:
        found = images.header(read_bytes(path), str(path))
        grey = grey and found.grey
        if found[:2] != first[:2]:
            raise ValueError(
                f"{path}: the image is {found.width} x {found.height}, but {paths[0]} is {first.width} x "
                f"{first.height}; all images must have the same size, resize them first"
            )
    return 1 if grey else 3, first.height, first.width


def _read(part: Listing, numbers: dict[str, int], shape: tuple[int, int, int]) -> Part:
    paths = [(path, numbers[name]) for name in sorted(part, key=numbers.__getitem__) for path in part[name]]
    x = np.empty((len(paths), *shape), np.uint8)
    for row, (path, _) in zip(x, paths, strict=True):
        row[...] = images.decode(read_bytes(path), shape, str(path))
    return x, np.array([number for _, number in paths], np.int64)


def _decode(root: Path, train: Listing, test: Listing) -> Arrays:
    foreign = sorted(set(test) - set(train))
    if foreign:
        raise ValueError(f"{root / 'test' / foreign[0]}: a class that {root / 'train'} does not have")
    numbers, shape = {name: number for number, name in enumerate(train)}, _shape(_files(train, test))
    return Arrays(*_read(train, numbers, shape), *_read(test, numbers, shape), tuple(train))


def _decode_official(known: Official, root: Path, train: Listing, test: Listing) -> Arrays:
    numbers = {name: number for number, name in enumerate(known.classes)}
    numbers |= {str(number): number for number in range(len(known.classes))}
    numbers |= {name.replace("/", "_"): number for name, number in list(numbers.items())}
    for part, found in (("train", train), ("test", test)):
        foreign = sorted(set(found) - set(numbers))
        if foreign:
            raise ValueError(
                f"{root / part / foreign[0]}: not a class of {known.name} ({', '.join(known.classes[:10])}"
                f"{', ...' if len(known.classes) > 10 else ''}); for other classes use --data folder:{root}"
            )
    arrays = Arrays(*_read(train, numbers, known.shape), *_read(test, numbers, known.shape), known.classes)
    return check_all_classes(arrays, str(root / "train"))


def _files(*parts: Listing) -> tuple[Path, ...]:
    return tuple(path for part in parts for paths in part.values() for path in paths)


def source(root: Path) -> Source:
    """Any class-folder data set: its classes are its training folders, in the order of their names.

    Args:
        root: The folder of the data set.
    """
    train, test = listing(root / "train"), listing(root / "test")
    return Source("folder", "class folders", root, _files(train, test), partial(_decode, root, train, test))


def find(known: Official, root: Path) -> list[Source]:
    """Class folders of an official data set, named by its classes or by their numbers.

    Args:
        known: The data set.
        root: The folder that is searched.
    """
    if not ((root / "train").is_dir() and (root / "test").is_dir()):
        return []
    train, test = listing(root / "train"), listing(root / "test")
    decode = partial(_decode_official, known, root, train, test)
    return [Source(known.name, "class folders", root, _files(train, test), decode)]

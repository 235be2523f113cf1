"""LEAF's files: train/*.json and test/*.json, each {users: [...], user_data: {user: {x: [...], y: [...]}}}.

Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedlesam.data._files import CLASSES, Arrays, Labels, Source, Values, check_labels, plain_bytes
from fedlesam.data.catalogue import FileRequest
from fedlesam.data.formats.shakespeare import VOCABULARY, encode

PIXELS = 784
"""Numbers of a sample that is a picture of 28 x 28, from 0 to 1."""


class Part(NamedTuple):
    """The samples of all users of a part, one user after the other."""

    x: Values
    """Inputs, a row for each sample."""
    y: Labels
    """Labels."""
    users: list[str]
    """Their names."""
    sizes: list[int]
    """The samples of each user."""
    letters: bool
    """The labels are characters."""


def find(request: FileRequest, root: Path) -> Source | None:
    """LEAF's files in a folder.

    Args:
        request: What the user asked for.
        root: The folder.
    """
    train, test = (tuple(sorted((root / part).glob("*.json"))) for part in ("train", "test"))
    if not train:
        return None
    decode = partial(_decode, train, test, request.known.classes)
    missing = () if test else (root / "test" / "*.json",)
    return Source(request.kind, "LEAF's json", root, (*train, *test), decode, missing)


def _decode(train: tuple[Path, ...], test: tuple[Path, ...], classes: tuple[str, ...]) -> Arrays:
    first, second = _part(train), _part(test)
    letters = first.x.dtype == np.int32
    if (first.x.dtype, first.x.shape[1:]) != (second.x.dtype, second.x.shape[1:]):
        raise ValueError(f"{test[0]}: its samples are not like those of {train[0]}")
    if first.letters != second.letters:
        raise ValueError(
            f"{test[0]}: its labels are {_kind(second.letters)}, those of {train[0]} {_kind(first.letters)}"
        )
    if first.letters:
        classes = VOCABULARY
    classes = classes or tuple(map(str, range(int(first.y.max()) + 1)))
    for paths, part in ((train, first), (test, second)):
        check_labels(part.y, len(classes), str(paths[0].parent))
    names = sorted(first.users)
    numbers = {name: number for number, name in enumerate(names)}
    of, theirs = (
        np.repeat(np.array([numbers.get(user, -1) for user in part.users], np.int64), part.sizes)
        for part in (first, second)
    )
    own = theirs if (theirs >= 0).any() else None
    vocabulary = VOCABULARY if letters else ()
    return Arrays(first.x, first.y, second.x, second.y, classes, of, own, tuple(names), vocabulary)


def _part(paths: tuple[Path, ...]) -> Part:
    x: list[Values] = []
    y: list[Labels] = []
    users: dict[str, int] = {}
    letters: dict[str, bool] = {}
    for path in paths:
        for user, samples in _users(path):
            where = f"{path}, user {user!r:.60}"
            if user in users:
                raise ValueError(f"{where}: is there twice")
            if not (isinstance(samples, dict) and all(isinstance(samples.get(key), list) for key in ("x", "y"))):
                raise ValueError(f"{where}: expected {{x: [...], y: [...]}}")
            if len(samples["x"]) != len(samples["y"]):
                raise ValueError(f"{where}: has {len(samples['x'])} samples and {len(samples['y'])} labels")
            if samples["y"]:
                x.append(_inputs(samples["x"], where))
                y.append(_targets(samples["y"], where))
                users[user] = len(samples["y"])
                letters[user] = isinstance(samples["y"][0], str)
                other = next(iter(users))
                if letters[user] != letters[other]:
                    told = f"its labels are {_kind(letters[user])}, those of {other!r:.60} {_kind(letters[other])}"
                    raise ValueError(f"{where}: {told}; give labels of one kind")
                if (x[-1].dtype, x[-1].shape[1:]) != (x[0].dtype, x[0].shape[1:]):
                    raise ValueError(f"{where}: its samples are not like those of {other!r:.60}")
    if not users:
        raise ValueError(f"{paths[0].parent}: no user has a sample")
    return Part(np.concatenate(x), np.concatenate(y), list(users), list(users.values()), any(letters.values()))


def _kind(letters: bool) -> str:
    return "characters" if letters else "class numbers"


def _users(path: Path) -> list[tuple[str, Any]]:
    try:
        found = json.loads(plain_bytes(path))
        return [(str(user), found["user_data"][user]) for user in found["users"]]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); truncated or damaged, make it again") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: is not LEAF's; expected {{users: [...], user_data: {{...}}}}") from error


def _inputs(rows: list[Any], where: str) -> Values:
    """Texts of one length become numbers of letters, 784 numbers a picture, other numbers stay a row."""
    if all(isinstance(row, str) for row in rows):
        if len({len(row) for row in rows}) != 1:
            raise ValueError(f"{where}: its texts have several lengths; samples must have one")
        if not rows[0]:
            raise ValueError(f"{where}: its texts are empty; leave the user out")
        return np.stack([encode(row) for row in rows])
    try:
        x = np.asarray(rows, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{where}: a sample must be a row of numbers or a text, all of one length") from error
    if x.ndim != 2 or not x.size or not np.isfinite(x).all():
        raise ValueError(f"{where}: a sample must be a row of finite numbers, got the shape {x.shape}")
    if x.shape[1] != PIXELS:
        return x
    if x.min() < 0 or x.max() > 1:
        raise ValueError(f"{where}: a picture's values are from 0 to 1, got {x.min():g} to {x.max():g}")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28)


def _targets(labels: list[Any], where: str) -> Labels:
    if all(isinstance(label, str) and len(label) == 1 for label in labels):
        return np.array([int(encode(label)[0]) for label in labels], np.int64)
    if not all(isinstance(label, int) and not isinstance(label, bool) for label in labels):
        raise ValueError(f"{where}: a label must be a class number, or one character")
    wrong = next((label for label in labels if not 0 <= label < CLASSES), None)
    if wrong is not None:
        raise ValueError(f"{where}: has the label {wrong}, and class numbers are from 0 to {CLASSES - 1:,}")
    return np.array(labels, np.int64)

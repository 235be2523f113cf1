"""Plays by speaking role, as LEAF makes samples of them: 80 characters, and the next one as the class.

Caldas et al., LEAF: A Benchmark for Federated Settings, 2018. Line breaks become spaces, and several spaces one. A
role's samples are divided by their position: the first four fifths are trained on, and between them and the test
samples as many are left out as share characters with both. LEAF takes every position; `stride` takes fewer.
"""

import string
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedlesam.data._files import Arrays, Labels, Source
from fedlesam.data.catalogue import FileRequest
from fedlesam.data.formats import jsonl

LETTERS = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""LEAF's alphabet."""
VOCABULARY = (*LETTERS, "\N{REPLACEMENT CHARACTER}")
"""The last one stands for any other character."""
LENGTH = 80
TRAINED = 0.8
"""Of a role's samples."""
FILES = ("roles.jsonl.gz", "roles.jsonl")

Tokens = npt.NDArray[np.int32]
_NUMBERS = {letter: number for number, letter in enumerate(LETTERS)}


def encode(text: str) -> Tokens:
    """The numbers of characters.

    Args:
        text: Any text.
    """
    return np.array([_NUMBERS.get(letter, len(LETTERS)) for letter in text], np.int32)


def find(request: FileRequest, root: Path) -> Source | None:
    """The file of roles in a folder.

    Args:
        request: What the user asked for.
        root: The folder.
    """
    for name in FILES:
        if (root / name).is_file():
            decode = partial(_decode, root / name, **request.options)
            return Source(request.kind, "speaking roles", root, (root / name,), decode)
    return None


def _texts(path: Path) -> dict[str, str]:
    """Everything a role says, by "play: role"."""
    said: dict[str, list[str]] = {}
    for where, row in jsonl.rows(path):
        play, role, speeches = jsonl.text_of(row, "play", where), jsonl.text_of(row, "role", where), row.get("speeches")
        if not role.strip():
            raise ValueError(f"{where}: the role has no name")
        if not isinstance(speeches, list) or not all(isinstance(speech, str) for speech in speeches):
            raise ValueError(f"{where}: 'speeches' must be a list of texts")
        said.setdefault(f"{play}: {role}", []).extend(speeches)
    return {name: " ".join(" ".join(speeches).split()) for name, speeches in said.items()}


def places(characters: int, stride: int) -> tuple[Labels, Labels]:
    """Where the training and the test samples of a role begin.

    Args:
        characters: Of the role.
        stride: From one sample to the next.
    """
    samples = characters - LENGTH
    trained = max(0, int(TRAINED * samples))
    return np.arange(0, trained, stride), np.arange(trained + LENGTH - 1, max(0, samples), stride)


def _decode(path: Path, stride: int, least: int) -> Arrays:
    texts = _texts(path)
    windows: tuple[list[Tokens], list[Tokens]] = ([], [])
    owners: tuple[list[Labels], list[Labels]] = ([], [])
    names: list[str] = []
    for name in sorted(texts):
        starts = places(len(texts[name]), stride)
        if len(texts[name]) < least or not all(map(len, starts)):
            continue
        cut = np.lib.stride_tricks.sliding_window_view(encode(texts[name]), LENGTH + 1)
        for part, start in enumerate(starts):
            windows[part].append(cut[start])
            owners[part].append(np.full(len(start), len(names)))
        names.append(name)
    if not names:
        longest = max(map(len, texts.values()), default=0)
        raise ValueError(
            f"{path}: of {len(texts)} roles none has {least:,} characters and a test sample; "
            f"the longest has {longest:,}"
        )
    train, test = map(np.concatenate, windows)
    of, test_of = map(np.concatenate, owners)
    parts = [(np.ascontiguousarray(rows[:, :LENGTH]), rows[:, LENGTH].astype(np.int64)) for rows in (train, test)]
    return Arrays(*parts[0], *parts[1], VOCABULARY, of, test_of, tuple(names), VOCABULARY)

"""Texts with a class each: lines of JSON, or a folder of texts for each class."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedlesam.data._files import Arrays, Labels, Source, numbered_classes, read_bytes
from fedlesam.data.catalogue import FileRequest
from fedlesam.data.formats import jsonl
from fedlesam.data.words import count_words, encode

PARTS = ("train", "test")
HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]*:(\s|$)")
QUOTED = re.compile(r"\s*[>|:}]|.*\b(writes|wrote|says|said)( in .*)?:\s*$|In article\b")
SIGNATURE = re.compile(r"--\s*$")


class Text(NamedTuple):
    """A text with its class and its client, and where it is, for messages."""

    where: str
    """File and line, for messages."""
    text: str
    """As the file has it."""
    label: int | str
    """A class number, or its name."""
    client: str | None
    """Whose text it is; None where the file does not say."""


def strip_post(text: str) -> str:
    """A post to a news group without what gives the group or the author away.

    Left out are the header; blocks of header lines (`Archive-name: ...`) that follow it; quoted lines and the lines
    that introduce them; and the signature below a line `--`.

    Args:
        text: The post.
    """
    blocks = text.split("\n\n")[1:]
    while blocks and all(HEADER.match(line) or line[:1].isspace() for line in blocks[0].splitlines()):
        blocks = blocks[1:]
    lines = [line for line in "\n\n".join(blocks).splitlines() if not QUOTED.match(line)]
    end = next((number for number, line in enumerate(lines) if SIGNATURE.match(line)), len(lines))
    return "\n".join(lines[:end])


STRIPPED: dict[str, Callable[[str], str]] = {"20newsgroups": strip_post}


def find(request: FileRequest, root: Path) -> Source | None:
    """The texts of a folder, in either form.

    Args:
        request: What the user asked for.
        root: The folder.
    """
    files = [next((root / f"{part}{end}" for end in (".jsonl.gz", ".jsonl") if (root / f"{part}{end}").is_file()), None)
             for part in PARTS]  # fmt: skip
    if files[0] is not None:
        found = tuple(path for path in files if path is not None)
        named = root / "classes.txt"
        listed = (named,) if named.is_file() and not request.known.classes else ()
        missing = () if len(found) == 2 else (root / "test.jsonl",)
        decode = partial(_decode, request, root, partial(_lines, found), listed)
        return Source(request.kind, "lines of JSON", root, (*found, *listed), decode, missing)
    for prefix in ("", "20news-bydate-"):
        folders = [root / f"{prefix}{part}" for part in PARTS]
        if all(folder.is_dir() for folder in folders):
            paths = [[p for p in sorted(folder.glob("*/*")) if p.is_file() and p.name[0] != "."] for folder in folders]
            decode = partial(_decode, request, root, partial(_files, paths), ())
            return Source(request.kind, "folders of texts", root, tuple(p for part in paths for p in part), decode)
    return None


def _lines(paths: tuple[Path, ...]) -> Iterator[list[Text]]:
    for path in paths:
        yield [_text(where, row) for where, row in jsonl.rows(path)]


def _text(where: str, row: jsonl.Row) -> Text:
    text, label, client = jsonl.text_of(row, "text", where), row.get("label"), row.get("client")
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise ValueError(f"{where}: 'label' must be a class number or a class name, and is {label!r:.40}")
    if client is not None and (isinstance(client, bool) or not isinstance(client, int | str)):
        raise ValueError(f"{where}: 'client' must be a text or a whole number, and is {client!r:.40}")
    return Text(where, text, label, None if client is None else str(client))


def _files(parts: list[list[Path]]) -> Iterator[list[Text]]:
    for paths in parts:
        yield [Text(str(p), read_bytes(p).decode("utf-8", "replace"), p.parent.name, None) for p in paths]


def _decode(
    request: FileRequest, root: Path, read: Callable[[], Iterator[list[Text]]], listed: tuple[Path, ...]
) -> Arrays:
    train, test = read()
    for part, texts in zip(PARTS, (train, test), strict=True):
        if not texts:
            raise ValueError(f"{root}: there are no {part} texts")
    classes = request.known.classes
    for path in listed:
        classes = tuple(
            line.strip() for line in read_bytes(path).decode("utf-8", "replace").splitlines() if line.strip()
        )
    classes = classes or _classes(train)
    strip = STRIPPED.get(request.known.name, str)
    stripped = [[strip(text.text) for text in part] for part in (train, test)]
    vocabulary = count_words(stripped[0], request.options["words"])
    if len(vocabulary) < 3:
        raise ValueError(f"{train[0].where}: the training texts have no word")
    x, u = (encode(part, vocabulary, request.options["length"]) for part in stripped)
    y, v = (_labels(part, classes) for part in (train, test))
    return Arrays(x, y, u, v, classes, *_clients(train, test), vocabulary)


def _classes(train: list[Text]) -> tuple[str, ...]:
    """Of texts that bring their own: names in their order, or numbers from 0."""
    labels = {text.label for text in train}
    if all(isinstance(label, str) for label in labels):
        return tuple(sorted(map(str, labels)))
    return numbered_classes(
        max(label for label in labels if isinstance(label, int)), train[0].where.rpartition(", line")[0]
    )


def _labels(texts: list[Text], classes: tuple[str, ...]) -> Labels:
    numbers: dict[int | str, int] = {name: number for number, name in enumerate(classes)}
    numbers |= {number: number for number in range(len(classes))}
    for text in texts:
        if text.label not in numbers:
            known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
            raise ValueError(
                f"{text.where}: unknown label {text.label!r}; the {len(classes)} classes are {known} "
                f"(0 to {len(classes) - 1})"
            )
    return np.array([numbers[text.label] for text in texts], np.int64)


def _clients(train: list[Text], test: list[Text]) -> tuple[Labels | None, Labels | None, tuple[str, ...]]:
    """Whose each text is, where the training texts say so."""
    without = [text for text in train if text.client is None]
    if len(without) == len(train):
        return None, None, ()
    if without:
        raise ValueError(f"{without[0].where}: has no 'client', and other texts have one; give it to all or to none")
    names = sorted({str(text.client) for text in train})
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    of, theirs = (np.array([numbers.get(text.client, -1) for text in part], np.int64) for part in (train, test))
    return of, theirs if (theirs >= 0).any() else None, tuple(names)

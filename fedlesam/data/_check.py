"""What a name and a folder stand for: the form that was found, its files, and how many images of which class."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedlesam.data._files import file_digest, files_digest, plain_bytes
from fedlesam.data._load import from_listed, from_source, source_of
from fedlesam.data._schemes import natural
from fedlesam.data.catalogue import EMBEDDED, OFFICIAL, Official, is_domains, is_own, load, parse_domains
from fedlesam.data.dataset import DataSet
from fedlesam.data.formats import domains, find

SHOWN = 8
"""Files and classes in the text; the fields have them all."""


@dataclass(frozen=True)
class FoundFile:
    """A file of a data set.

    Attributes:
        path: Where it is.
        size: In bytes.
        official: Whether its checksum is its publishers'; None where they give none for this form.
    """

    path: Path
    size: int
    official: bool | None


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        data: The data set, loaded.
        form: How it is stored, e.g. "binary archive".
        files: The files that were read.
        passed_over: Other forms that are there too.
        source: Hash of the files; "" where there are none.
        train_counts: Training images per class.
        test_counts: Test images per class.
    """

    data: DataSet
    form: str
    files: tuple[FoundFile, ...]
    passed_over: tuple[str, ...]
    source: str
    train_counts: tuple[int, ...]
    test_counts: tuple[int, ...]

    def lines(self) -> list[str]:
        """The findings as lines of text."""
        shape = " x ".join(map(str, self.data.shape))
        parts = self.data.domains
        what = "images" if len(self.data.shape) == 3 else "samples"
        images = f"{len(self.data.train):,} training and {len(self.data.test):,} test {what}"
        if parts is not None:
            images = f"{len(self.data.train):,} images of {len(parts.names)} domains"
        lines = [
            f"{self.data.name}: {images}, {len(self.data.classes)} classes, {shape}",
            f"form: {self.form}" + (f" (also there: {', '.join(self.passed_over)})" if self.passed_over else ""),
        ]
        verdict = {True: ", checksum official", False: ", checksum not the official file's", None: ""}
        lines += [f"file: {file.path} ({file.size:,} bytes{verdict[file.official]})" for file in self.files[:SHOWN]]
        lines += [f"and {len(self.files) - SHOWN:,} more files"] if len(self.files) > SHOWN else []
        lines += [f"fingerprint: {self.data.fingerprint}"]
        lines += [*_vocabulary(self.data), *_clients(self.data)]
        if parts is not None:
            for number, name in enumerate(parts.names):
                counts = np.bincount(self.data.train.y.numpy()[parts.of == number], minlength=len(self.data.classes))
                lines += [f"domain {name}: {counts.sum():,} images, {counts.min():,} to {counts.max():,} of a class"]
            return lines
        rows = list(zip(self.data.classes, self.train_counts, self.test_counts, strict=True))
        if len({row[1:] for row in rows}) == 1:
            return [*lines, f"every class: {rows[0][1]:,} training, {rows[0][2]:,} test {what}"]
        return lines + [
            f"class {name if name.strip() else repr(name)}: {train:,} training, {test:,} test {what}"
            for name, train, test in rows
        ]


def _vocabulary(data: DataSet) -> list[str]:
    if not data.vocabulary:
        return []
    first = ", ".join(repr(token) for token in data.vocabulary[:SHOWN])
    return [f"vocabulary: {len(data.vocabulary):,} tokens, {data.shape[0]} of a sample are read: {first}, ..."]


def _clients(data: DataSet) -> list[str]:
    if data.owners is None:
        return []
    split = natural(data.owners)
    sizes = split.sizes
    first = (
        f"clients: {len(split):,}, {sizes.min():,} to {sizes.max():,} training samples, median {np.median(sizes):,.0f}"
    )
    if split.tests is None:
        return [first, "the test samples are of others than the clients"]
    own = np.array([*map(len, split.tests)])
    return [first, f"test samples of a client: {own.min():,} to {own.max():,}, median {np.median(own):,.0f}"]


def check(name: str, data_dir: Path | None = None) -> Check:
    """Load a data set and report what was found.

    Args:
        name: As for `load`.
        data_dir: As for `load`.

    Raises:
        ValueError: The data set is not there or damaged.
    """
    if name in EMBEDDED or is_own(name):
        return _report(load(name), "embedded" if name in EMBEDDED else "python callable", (), "", ())
    if name.startswith("features:"):
        path = Path(name.removeprefix("features:")).expanduser()
        return _report(load(name), "frozen features", (path,), file_digest(path, "sha256"), ())
    if is_domains(name):
        request = parse_domains(name)
        listed = domains.find(request, data_dir)
        data = from_listed(name, listed, request.size)
        return _report(data, listed.form, listed.files, files_digest(listed.root, listed.files), ())
    source = source_of(name, data_dir)
    others = find.find(OFFICIAL[name], data_dir)[1:] if name in OFFICIAL else []
    where = tuple(f"{other.form} in {other.root}" for other in others)
    return _report(from_source(name, source), source.form, source.files, source.digest(), where)


def _report(data: DataSet, form: str, paths: tuple[Path, ...], digest: str, passed_over: tuple[str, ...]) -> Check:
    parts = (data.train, data.test)
    counts = [tuple(part.y.bincount(minlength=len(data.classes)).tolist()) if data.classes else () for part in parts]
    known = OFFICIAL.get(data.name)
    files = tuple(FoundFile(path, path.stat().st_size, _official(path, known)) for path in paths)
    return Check(data, form, files, passed_over, digest, counts[0], counts[1])


def _official(path: Path, known: Official | None) -> bool | None:
    """Of a gzipped file the contents count: packagers pack them anew."""
    if known is None:
        return None
    if path.name in known.md5 and file_digest(path, "md5") == known.md5[path.name]:
        return True
    plain = known.plain_md5.get(path.name.removesuffix(".gz").replace(".idx", "-idx"))
    if plain is not None:
        return hashlib.md5(plain_bytes(path), usedforsecurity=False).hexdigest() == plain
    return False if path.name in known.md5 else None

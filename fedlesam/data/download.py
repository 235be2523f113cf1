"""Get an official data set: resumed after a break, compared with its checksum, and only then given its name."""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fedlesam.data.catalogue import EMBEDDED
from fedlesam.data.domain_sets import DOMAIN_SETS
from fedlesam.data.find import DEFAULT_DIR
from fedlesam.data.official import OFFICIAL, Official
from fedlesam.data.source import file_digest
from fedlesam.names import unknown

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are there, and their number in all where the server tells it."""

CHUNK = 2**16
LARGEST = 2**30
TRIES = 4
"""In a row without a new byte."""


class _Broken(Exception):
    """The transfer stopped; what came stays in the .part file."""


def fetch(
    name: str,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    *,
    base_url: str | None = None,
    wait: float = 1.0,
    timeout: float = 30.0,
) -> list[Path]:
    """The official files of `name` in data_dir/name, downloaded where they are not there yet.

    `wait` seconds pass before the second try, twice as many before each further one.
    """
    known = _known(name)
    folder = target_folder(known, data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made: {error.strerror}; choose another --data-dir") from error
    paths = []
    for file in known.fetched:
        path = folder / file
        if not _is_there(path, known.md5[file]):
            url = (base_url or known.base_url).rstrip("/") + "/" + file
            _Download(url, path, known, progress or (lambda *_: None), wait, timeout).run()
        elif progress is not None:
            progress(file, path.stat().st_size, path.stat().st_size)
        paths.append(path)
    return paths


def target_folder(known: Official, data_dir: Path | None) -> Path:
    """One folder per data set, as MNIST and Fashion-MNIST name their files alike."""
    folder = Path(data_dir if data_dir is not None else DEFAULT_DIR).expanduser()
    return folder if folder.name == known.name else folder / known.name


def _known(name: str) -> Official:
    if name in EMBEDDED:
        raise ValueError(f"{name}: is embedded, there is nothing to fetch")
    if name.partition(":")[0] in DOMAIN_SETS:
        raise ValueError(f"{name}: is not downloaded; get it from its publishers and name its folder with --data-dir")
    if ":" in name:
        raise ValueError(f"{name}: is your own data, there is nothing to fetch; known are {', '.join(OFFICIAL)}")
    if name not in OFFICIAL:
        raise unknown("data", name, OFFICIAL)
    return OFFICIAL[name]


def _is_there(path: Path, md5: str) -> bool:
    if not path.exists():
        return False
    found = file_digest(path, "md5")
    if found != md5:
        raise ValueError(
            f"{path}: its md5 is {found}, the official file's is {md5}; remove it (or choose another --data-dir) "
            "and fetch again"
        )
    return True


class _Download:
    """One file. Its state is the .part file: whatever happens, the next try, or the next process, goes on from it."""

    def __init__(self, url: str, path: Path, known: Official, progress: Progress, wait: float, timeout: float) -> None:
        self.url, self.path, self.known = url, path, known
        self.md5 = known.md5[path.name]
        self.part = path.with_name(path.name + ".part")
        self.progress, self.wait, self.timeout = progress, wait, timeout

    def run(self) -> None:
        resumed = self._size() > 0
        self._transfer()
        if file_digest(self.part, "md5") != self.md5 and resumed:
            self.part.unlink()
            self._transfer()
        found = file_digest(self.part, "md5")
        if found != self.md5:
            self.part.unlink()
            raise ValueError(
                f"{self.url}: what came has the md5 {found}, the official file's is {self.md5}; nothing was kept. "
                f"{self._by_hand()}"
            )
        self.part.replace(self.path)

    def _transfer(self) -> None:
        failures, best = 0, self._size()
        while True:
            try:
                self._once()
                return
            except OSError as error:
                if isinstance(error, PermissionError) or error.filename == str(self.part):
                    raise ValueError(f"{self.part}: cannot be written: {error.strerror}") from error
                problem: Exception = error
            except (_Broken, http.client.HTTPException) as error:
                problem = error
            refused = isinstance(problem, urllib.error.HTTPError) and problem.code in (401, 403, 404, 410)
            failures = 1 if self._size() > best else failures + 1
            best = max(best, self._size())
            if refused or failures >= TRIES:
                reason = getattr(problem, "reason", None) or problem
                raise ValueError(f"{self.url}: cannot be fetched ({reason}). {self._by_hand()}") from problem
            time.sleep(self.wait * 2 ** (failures - 1))

    def _once(self) -> None:
        have = self._size()
        request = urllib.request.Request(self.url, headers={"User-Agent": "fedlesam", "Accept-Encoding": "identity"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        try:
            response = urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 416:
                raise
            if file_digest(self.part, "md5") == self.md5:
                return
            self.part.unlink()
            raise _Broken("the server has no such range") from error
        with response:
            self._receive(response, have)

    def _receive(self, response: http.client.HTTPResponse, have: int) -> None:
        resumes = response.status == 206 and (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        if response.status == 206 and not resumes:
            raise _Broken(f"the server sent the range {response.headers.get('Content-Range')!r}, not from {have}")
        done = have if resumes else 0
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else None
        with self.part.open("ab" if resumes else "wb") as file:
            done = self._copy(response, file, done, total)
        if total is not None and done < total:
            raise _Broken(f"the connection broke off after {done:,} of {total:,} bytes")

    def _copy(self, response: http.client.HTTPResponse, file: IO[bytes], done: int, total: int | None) -> int:
        self.progress(self.path.name, done, total)
        while block := response.read(CHUNK):
            done += len(block)
            if done > LARGEST:
                raise ValueError(f"{self.url}: sends more than {LARGEST:,} bytes; this is not the official file")
            file.write(block)
            self.progress(self.path.name, done, total)
        return done

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _by_hand(self) -> str:
        return (
            f"Without a network: put the file {self.path.name} (md5 {self.md5}) into the folder "
            f"{self.path.parent.absolute()}"
        )

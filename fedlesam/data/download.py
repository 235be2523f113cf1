"""Get an official data set: downloaded by pooch, compared with its checksum, and only then given its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlesam.core.names import unknown
from fedlesam.data.catalogue import DEFAULT_DIR, DOMAIN_SETS, EMBEDDED, FILE_SETS, OFFICIAL, Official

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes so far, and their number in all where the server tells it."""

CHUNK = 2**16
RETRIES = 3
"""After a broken transfer or a wrong checksum; pooch waits a second longer before each."""
TIMEOUT = 30.0
"""Seconds without a byte from the server."""


class _Bar:
    """What pooch expects of a progress bar for one transfer. It sets `total` when that begins."""

    def __init__(self, file: str, progress: Progress) -> None:
        self.file, self.progress, self.done, self.total = file, progress, 0, 0

    def reset(self) -> None:
        self.done = 0

    def update(self, size: int) -> None:
        self.done += size
        self.progress(self.file, min(self.done, self.total or self.done), self.total or None)

    def close(self) -> None:
        pass


def fetch(
    name: str, data_dir: Path | None = None, progress: Progress | None = None, *, base_url: str | None = None
) -> list[Path]:
    """Download the official files of a data set that are not there yet.

    Args:
        name: A data set that has a download, e.g. `cifar10`.
        data_dir: The files go to the folder `data_dir/name`. Default: `./data`.
        progress: Called with a file's name, the bytes so far, and all bytes or None.
        base_url: A mirror of the official address.

    Returns:
        The paths of all files of the data set.

    Raises:
        ValueError: The name has no download, the server does not deliver, or a file of another content is in the way.
    """
    import pooch

    known = _known(name)
    folder = target_folder(known, data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made: {error.strerror}; choose another --data-dir") from error
    pooch.get_logger().setLevel("WARNING")
    registry = {file: f"md5:{known.md5[file]}" for file in known.fetched}
    address = (base_url or known.base_url).rstrip("/") + "/"
    remote = pooch.create(folder, address, registry=registry, retry_if_failed=RETRIES, allow_updates=False)

    def get(url: str, *where: Any) -> None:
        bar = _Bar(url.rpartition("/")[2], progress) if progress is not None else False
        pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=TIMEOUT)(url, *where)

    for file in known.fetched:
        path = folder / file
        try:
            remote.fetch(file, downloader=get)
        except (OSError, ValueError) as error:  # also those of requests
            md5 = f"(md5 {known.md5[file]})"
            reason = f"{path}: is not the official file {md5}; remove it, or choose another --data-dir"
            if not path.is_file():
                remedy = f"Without a network: put the file {file} {md5} into the folder {folder.absolute()}"
                reason = f"{address}{file}: cannot be fetched ({error}). {remedy}"
            raise ValueError(reason) from error
        if progress is not None:
            progress(file, path.stat().st_size, path.stat().st_size)
    return [folder / file for file in known.fetched]


def target_folder(known: Official, data_dir: Path | None) -> Path:
    """One folder per data set, because MNIST and Fashion-MNIST name their files alike.

    Args:
        known: The data set.
        data_dir: The user's data folder; None for the default.
    """
    folder = Path(data_dir if data_dir is not None else DEFAULT_DIR).expanduser()
    return folder if folder.name == known.name else folder / known.name


def _known(name: str) -> Official:
    if name in EMBEDDED:
        raise ValueError(f"{name}: is part of the package, there is nothing to fetch")
    if name.partition(":")[0] in DOMAIN_SETS.keys() | FILE_SETS.keys():
        raise ValueError(f"{name}: is not downloaded; get it from its publishers and name its folder with --data-dir")
    if ":" in name:
        raise ValueError(f"{name}: is your own data, there is nothing to fetch; known are {', '.join(OFFICIAL)}")
    if name not in OFFICIAL:
        raise unknown("data", name, OFFICIAL)
    return OFFICIAL[name]

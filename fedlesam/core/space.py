"""Room on a disk: how many bytes in words, and what to do where a file cannot be written."""

import errno
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


def size(count: float) -> str:
    """1,500,000 as 1.5MB, in the form `--memory` takes.

    Args:
        count: In bytes.
    """
    units, power = ["B", "kB", "MB", "GB", "TB"], 0
    while float(f"{count / 1000**power:.3g}") >= 1000 and power < len(units) - 1:
        power += 1
    return f"{float(f'{count / 1000**power:.3g}'):g}{units[power]}"


def is_full(error: BaseException | None) -> bool:
    """Whether a disk or a quota is; safetensors and other processes say it in words alone.

    Args:
        error: What writing raised.
    """
    if error is None:
        return False
    told = any(f"os error {number}" in str(error) or f"[Errno {number}]" in str(error) for number in FULL)
    return told or getattr(error, "errno", None) in FULL or is_full(error.__cause__)


def cannot_write(what: str, folder: Path, error: Exception, needed: int = 0, instead: str = "") -> str:
    """One line: what cannot be written where, why, and the remedy; `instead` is another one for a disk that is full.

    Args:
        what: What was to be written.
        folder: Where.
        error: What writing raised.
        needed: Its size in bytes; 0 if that is not known.
        instead: A remedy beside freeing the disk.
    """
    told = f"{folder}: {what} cannot be written: {error}"
    if not is_full(error):
        return f"{told}; mend that and repeat the command"
    takes = f" and it takes about {size(needed)}" if needed else ""
    other = f", or {instead}" if instead else ""
    return f"{told}; {_free(folder)} are free there{takes}: free some space and repeat the command{other}"


def _free(folder: Path) -> str:
    try:
        existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
        return size(shutil.disk_usage(existing).free)
    except OSError:
        return "few bytes"

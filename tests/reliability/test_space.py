"""What is said where a file cannot be written: which folder, how much is free, and a remedy that helps."""

import errno
from pathlib import Path

import pytest
from harness import Case, small
from instrument import Plan
from safetensors import SafetensorError

from fedlesam.core.space import cannot_write, is_full


@pytest.mark.parametrize("where", ["half save_file checkpoints/.round000002", "half write_parts checkpoints/clients/"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_for_which_there_is_no_room(where: str, workers: int, tmp_path: Path) -> None:
    """Not --memory: the memories are in RAM, and go to the disk for the checkpoint alone."""
    given = {"workers": 2, "store": "pinned"} if workers == 2 else {}
    case = Case(tmp_path, small("fedsmoo", rounds=3, **given))
    assert case.attempt(Plan(where, 1, do="full")).code == 2
    error = case.error.partition(": ")[2]
    assert error.startswith(f"{case.run / 'checkpoints'}: a checkpoint cannot be written: ")
    assert "No space left on device" in error
    assert " are free there and it takes about " in error
    assert error.endswith(
        ": free some space and repeat the command, or take fewer checkpoints: a larger --checkpoint-every, --keep 1"
    )
    assert "--memory" not in error
    assert case.attempt().code == 0, case.error


def test_memory_for_which_there_is_no_room(tmp_path: Path) -> None:
    case = Case(tmp_path, small("fedsmoo", rounds=3, memory=5_000))
    assert case.attempt(Plan("half save_file memory/", 1, do="full")).code == 2
    assert f"{case.run / 'memory'}: the memory of client " in case.error
    assert "a larger --memory" in case.error


def test_another_fault_needs_another_remedy(tmp_path: Path) -> None:
    told = cannot_write("a checkpoint", tmp_path, OSError(errno.EROFS, "Read-only file system"), 5)
    assert told.endswith("Read-only file system; mend that and repeat the command")
    assert "free" not in told


def test_full_in_all_its_words() -> None:
    assert is_full(OSError(errno.ENOSPC, "x"))
    assert is_full(OSError(errno.EDQUOT, "x"))
    assert is_full(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert is_full(OSError("[Errno 28] No space left on device"))
    assert not is_full(OSError(errno.EIO, "x"))

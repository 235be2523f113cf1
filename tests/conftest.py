"""One thread, in started programs too, Ctrl-C that works, and properties tried on the same examples everywhere."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from command_line import Call, Done
from hypothesis import HealthCheck, settings
from processes import ForkedJob

from fedlesam.cli import main

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile(
    "house", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")


def pytest_collection_finish() -> None:
    """What is here now stays until the end: collections of garbage pass over it, and forked processes share it."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are no part of an id: a gzip file has its time in them, and two processes would collect different tests."""
    return argname if isinstance(val, bytes) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: make test-gpu on a machine that has one")


# a shell's background jobs ignore SIGINT, and so would the programs that tests start and interrupt
with contextlib.suppress(ValueError):
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`fedlesam ...` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("FEDLESAM_TRACEBACK", raising=False)

    def fedlesam(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedlesam", *args])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return Done(int(end.value.code or 0), said.out, said.err)

    return fedlesam


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep's processes are forked, which spares their imports; tests/runs/test_sweep.py has real ones."""
    stand_in = types.SimpleNamespace(Popen=ForkedJob, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("fedlesam.runs.sweep.subprocess", stand_in)

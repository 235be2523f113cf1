"""The command line, called in this process."""

import sys
from pathlib import Path

import pytest
from command_line import Call, Done

from fedlesam.cli import main


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

"""The command `python -m reproduction`, called in this process."""

import sys
from collections.abc import Callable

import pytest

from fedlesam.cli import main
from reproduction.__main__ import command

Call = Callable[..., int | str | None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Gives the exit code."""

    def run(*arguments: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["reproduction", *arguments])
        with pytest.raises(SystemExit) as end:
            main(command)
        return end.value.code

    return run


@pytest.fixture(autouse=True)
def _forked(forked_jobs: None) -> None:
    """Runs of a sweep are forked."""

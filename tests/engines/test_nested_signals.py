"""Signals in blocks inside each other, and after a block that could not be entered."""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from fedlesam.engines import signals
from fedlesam.engines.signals import handle_signals


def noted(into: list[str], name: str, heard: threading.Event) -> Callable[[int], None]:
    def stop(signum: int) -> None:
        into.append(f"{name} {signal.Signals(signum).name}")
        heard.set()

    return stop


def test_a_signal_stops_all_blocks_that_are_open() -> None:
    calls: list[str] = []
    heard = threading.Event()
    with handle_signals(noted(calls, "outer", threading.Event())):
        with handle_signals(noted(calls, "gone", threading.Event())):
            pass
        with handle_signals(noted(calls, "inner", heard)):
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard.wait(20)
    assert calls == ["outer SIGTERM", "inner SIGTERM"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_that_could_not_be_entered_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> tuple[int, int]:
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", full)
        with pytest.raises(OSError, match="too many"), handle_signals(lambda _: None):
            raise AssertionError
    assert not signals._stops
    heard = threading.Event()
    with handle_signals(noted([], "later", heard)):
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.wait(20)

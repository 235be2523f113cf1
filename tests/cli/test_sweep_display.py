"""The lines of a sweep where there is no terminal."""

from pathlib import Path

import pytest

from fedlesam.cli.show import Display
from fedlesam.cli.sweep_display import watch_sweep
from fedlesam.runs import progress
from fedlesam.runs.config import RunConfig
from fedlesam.runs.sweep import Event, Task


def test_lines_have_the_round_the_metric_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    tasks = [Task(RunConfig(rounds=1000), Path(str(i)), f"rho {i}") for i in range(2)]
    with Display(quiet=False).open() as display:
        see = watch_sweep(display, tasks)
        assert capsys.readouterr().err == "2 runs to train, 2,000 rounds; the next line comes after the first\n", (
            "at once"
        )
        now = iter([100.0, 101.0])
        monkeypatch.setattr("fedlesam.cli.sweep_display.time.monotonic", lambda: next(now, 101.0))
        see(Event(tasks[0], "round", 1, state="test accuracy 40.0 %"))
        assert capsys.readouterr().err == "rounds 1/2,000  0 of 2 runs; rho 0 1/1000  test accuracy 40.0 %\n"
        see(Event(tasks[0], "round", 2, state="test accuracy 50.0 %"))
        said = capsys.readouterr().err
        assert "rounds 2/2,000" in said
        assert "33 min 18 s left" in said, "1,998 rounds at one a second"
        assert "rho 0 2/1000  test accuracy 50.0 %" in said

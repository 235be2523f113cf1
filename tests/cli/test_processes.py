"""The command line as real processes: pipes, completion in a shell, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY, contents, process
from processes import fedlesam
from safetensors.torch import load_file

from fedlesam.runs.folder import RunFolder


def test_a_real_run_and_its_repetition(tmp_path: Path) -> None:
    args = ["run", "--algorithm", "fedsam", "--rounds", "2", *TINY, "--out", "x"]
    done = process(*args, folder=tmp_path)
    assert done.code == 0
    assert "results: x" in done.out
    assert "\x1b" not in done.out + done.err, "no colours in a pipe"
    before = contents(tmp_path / "x")
    code, out, _ = fedlesam(tmp_path / "again", *args[:-1], "../x").wait()
    assert code == 0
    assert "already finished" in out
    assert contents(tmp_path / "x") == before


def test_a_real_mistake(tmp_path: Path) -> None:
    done = process("run", "--lr", "0", "--out", "x", folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: LocalTraining: lr must be above 0, got 0.0\n"
    assert list(tmp_path.iterdir()) == []


def test_a_real_comparison_in_a_pipe(tmp_path: Path) -> None:
    code, out, err = fedlesam(tmp_path, "compare", "fedavg", "fedlesam", "--rounds", "1", *TINY, "--out", "c").wait()
    assert code == 0
    assert "\x1b" not in out + err
    assert "fedlesam" in out
    assert (tmp_path / "c" / "accuracy.png").exists()


def completed(tmp_path: Path, **variables: str) -> str:
    script = Path(sys.executable).with_name("fedlesam")
    done = subprocess.run(
        [script], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(tmp_path: Path, shell: str) -> None:
    script = completed(tmp_path, _FEDLESAM_COMPLETE=f"{shell}_source")
    assert f"_FEDLESAM_COMPLETE={shell}_complete" in script
    assert "fedlesam" in script


def test_a_shell_gets_its_completions(tmp_path: Path) -> None:
    found = completed(tmp_path, _FEDLESAM_COMPLETE="bash_complete", COMP_WORDS="fedlesam co", COMP_CWORD="1")
    assert {line.partition(",")[2] for line in found.split()} == {"compare", "cost"}


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if condition():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    raise AssertionError("it never happened")


def test_ctrl_c_leaves_a_readable_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    args = ["run", "--rounds", "1000000", "--lr-decay", "1", *TINY, "--out", str(folder.path)]
    running = subprocess.Popen(
        [sys.executable, "-m", "fedlesam", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_for(lambda: folder.metrics.exists() and len(folder.metrics.read_bytes().splitlines()) > 2, running)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    done = folder.read_summary()["rounds"]
    end = f"interrupted by SIGINT; the checkpoint after round {done} is in {folder.path}: the same command resumes it\n"
    assert err.endswith(end) and err.count("interrupted") == 1
    summary: dict[str, Any] = folder.read_summary()
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert summary["state"] == "interrupted"
    assert summary["rounds"] == len(records) >= 2
    assert summary["accuracy"]["last"] == records[-1]["test_accuracy"]
    assert load_file(folder.model)["1.weight"].shape == (4, 64)
    assert not list(folder.path.glob("*.part"))

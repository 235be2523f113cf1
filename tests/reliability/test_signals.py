"""Ctrl-C and SIGTERM in the middle of a run; a restart by torchrun."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import References, flags, result, small
from processes import PATIENCE, Command, Forked, children, fedlesam, fork, wait_for

from fedlesam.federation import Federation
from fedlesam.runs import runner
from fedlesam.runs.checkpoint import Checkpoints, Manifest
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
CODES = {"SIGINT": 130, "SIGTERM": 143}


class Started(Command):
    """The same, as a program started from a shell."""

    def __init__(self, place: Path, command: list[str], **environment: str) -> None:
        reading, writing = os.pipe()
        with (place / "out").open("w") as out, (place / "err").open("w") as err:
            self.program = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=place,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=[writing],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "helpers"))),
                    "OMP_NUM_THREADS": "1",
                    **environment,
                },
            )
        os.close(writing)
        super().__init__(Forked(self.program.pid, reading), place)

    def wait(self) -> tuple[int, str, str]:
        try:
            self.process.until_gone()
            self.program.wait(PATIENCE)
        finally:
            if self.program.poll() is None:
                for pid in [*children(self.program.pid), self.program.pid]:  # torchrun's have sessions of their own
                    os.kill(pid, signal.SIGKILL)
            self.program.wait()
            os.close(self.process.pipe)
        return self.program.returncode, self.said("out"), self.said("err")


def check_stopped(run: Path, code: int, err: str, name: str) -> int:
    """Stopped gracefully, with a checkpoint of the last whole round; how many rounds that were."""
    assert code == CODES[name], err
    assert "Traceback" not in err
    assert "the same command resumes it" in err
    summary = RunFolder(run).read_summary()
    assert summary["state"] == "interrupted"
    done = len(RunFolder(run).read_metrics())
    assert 0 < done < 6
    assert summary["rounds"] == done
    assert Manifest.read(Checkpoints(run / "checkpoints").found()[0]).round == done
    assert not (run / "memory").exists()
    return done


@pytest.mark.parametrize("who", ["SIGINT", "SIGTERM", "SIGINT-all", "SIGTERM-all"])
@pytest.mark.parametrize("setup", [{}, {"workers": 2}, {"workers": 2, "store": "pinned"}], ids=str)
def test_a_signal_stops_a_run_gracefully(
    who: str, setup: dict[str, Any], references: References, tmp_path: Path
) -> None:
    """To the leader, or to all processes as from a terminal; `wait` ends when no process is left."""
    config = small("fedlesam-s", model="faulty:Net", checkpoint_every="1h", **setup)
    command = ["run", *flags(config), "--out", "run"]
    code, _, err = fedlesam(tmp_path, *command, FAULT=f"{who} 33").wait()
    done = check_stopped(tmp_path / "run", code, err, who.removesuffix("-all"))
    code, _, err = fedlesam(tmp_path, *command).wait()
    assert code == 0, err
    assert f"resuming after round {done} of 6" in err
    assert result(tmp_path / "run") == references(config)


@pytest.mark.parametrize(("name", "workers"), [pytest.param("SIGINT", 1, marks=pytest.mark.slow), ("SIGTERM", 2)])
def test_the_program_itself(name: str, workers: int, references: References, tmp_path: Path) -> None:
    config = small("fedsmoo", model="faulty:Net", workers=workers)
    command = ["fedlesam", "run", *flags(config), "--out", "run"]
    code, _, err = Started(tmp_path, command, FAULT=f"{name}-all 33").wait()
    check_stopped(tmp_path / "run", code, err, name)
    code, _, err = Started(tmp_path, command).wait()
    assert code == 0, err
    assert result(tmp_path / "run") == references(config)


@pytest.mark.parametrize("slow", ["leader", "worker"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_it_at_once(name: str, slow: str, references: References, tmp_path: Path) -> None:
    """While a local step takes for ever, here or in a worker for which the leader waits."""
    config = small("fedlesam-s", model="faulty:Net", workers=1 if slow == "leader" else 2)
    command, mark = ["run", *flags(config), "--out", "run"], tmp_path / "mark"
    running = fedlesam(tmp_path, *command, FAULT="wait 20", FAULT_IN=slow, MARK=str(mark))
    wait_for(mark.exists, running.process)
    signum = getattr(signal, name)
    os.kill(running.process.pid, signum)
    wait_for(lambda: not pending(running.process.pid), running.process)
    assert running.process.alive(), "the first one waits for the step to end"
    while running.process.alive():
        os.kill(running.process.pid, signum)
    code, _, err = running.wait()
    assert code == CODES[name], err
    assert not RunFolder(tmp_path / "run").read_summary()
    assert fedlesam(tmp_path, *command).wait()[0] == 0
    assert result(tmp_path / "run") == references(config)


def pending(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(line.startswith(("SigPnd", "ShdPnd")) and int(line.split()[1], 16) for line in lines)


def test_a_stop_in_the_last_round_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last step: the run is finished, but who asked to stop wants no next run of a comparison."""

    def work() -> None:
        real = runner._check_answers
        monkeypatch.setattr(runner, "_due", lambda *_: False)
        rounds = Federation.round

        def last(federation: Federation, **options: Any) -> Any:
            record = rounds(federation, **options)
            if record.round == 5:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_for(lambda: federation._local_engine.stop_flag._signum.value)
            return record

        monkeypatch.setattr(Federation, "round", last)
        monkeypatch.setattr(runner, "_check_answers", real)
        code = 0
        try:
            runner.execute(small("fedavg"), tmp_path / "run")
        except KeyboardInterrupt as stop:
            code = 128 + stop.signum  # type: ignore[attr-defined]
        os._exit(code)

    assert fork(work).wait().code == 143
    assert RunFolder(tmp_path / "run").is_finished()


def test_an_unclosed_federation_does_not_hang_at_exit(tmp_path: Path) -> None:
    """Workers ignore the signals by which a program ends its children."""
    script = """
import fedlesam as fl
from fedlesam.runs.build import build
from fedlesam.runs.config import RunConfig, resolve
federation = build(resolve(RunConfig(workers=2, clients=6, active=3, epochs=1, model="mlp:hidden=4"))).federation
federation.round()
print("done")
"""
    (tmp_path / "script.py").write_text(script)
    code, out, err = Started(tmp_path, ["script"], PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}").wait()
    assert (code, out) == (0, "done\n"), err


# torchrun


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[tuple[RunConfig, list[str]]]:
    config = small("fedlesam-s", model="faulty:Net")
    keep = [*flags(config), "--out", str(tmp_path / "run")]
    place = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    yield config, ["torch.distributed.run", *place, "-m", "fedlesam", "run", *keep]


@pytest.mark.parametrize("store", ["shared", pytest.param("pinned", marks=pytest.mark.slow)])
def test_torchrun_restarts_a_run(
    store: str, torchrun: tuple[RunConfig, list[str]], references: References, tmp_path: Path
) -> None:
    """One of two processes is killed once; torchrun starts both again, and they go on from the checkpoint."""
    config, command = torchrun
    mark = tmp_path / "mark"
    code, _, err = Started(tmp_path, [*command, "--store", store], FAULT="die-once 20", MARK=str(mark)).wait()
    assert code == 0, err
    assert mark.exists(), "it was killed"
    assert "resuming after round" in err
    assert result(tmp_path / "run") == references(config)

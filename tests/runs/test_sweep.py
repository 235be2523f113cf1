"""A queue of runs in real processes: shared, failed, killed, resumed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlesam.engines.signals import Interrupted
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig, Value
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute
from fedlesam.runs.sweep import Event, Sweep, Task

TINY: dict[str, Value] = {
    "algorithm": "fedavg",
    "model": "mlp:hidden=4",
    "clients": 6,
    "active": 2,
    "epochs": 1,
    "batch_size": 50,
    "rounds": 3,
    "threads": 1,
}


def tiny(**more: Value) -> RunConfig:
    return configs.resolve(configs.update(RunConfig(), {**TINY, **more}))


def do(path: Path, *wanted: RunConfig, jobs: int = 1) -> list[Event]:
    events: list[Event] = []
    with Sweep(path).open() as sweep:
        sweep.run([sweep.task(config, config.algorithm) for config in wanted], jobs, events.append)
    return events


def test_a_job_computes_what_a_run_here_computes(tmp_path: Path) -> None:
    """Several runs in one process, one after the other: each as if it were alone, and each once."""
    wanted = [tiny(seed=seed, algorithm=name) for seed, name in ((3, "fedlesam-s"), (4, "fedsam"))]
    events = do(tmp_path / "s", wanted[0], tiny(seed=3, algorithm="fedlesam-s", data_dir="elsewhere"), wanted[1])
    assert sum(event.what == "finished" for event in events) == 2, "the same settings are one run"
    for config in wanted:
        execute(config, tmp_path / f"alone{config.seed}")
        there = Sweep(tmp_path / "s").folder_of(config)
        assert (there / "model.safetensors").read_bytes() == (
            tmp_path / f"alone{config.seed}" / "model.safetensors"
        ).read_bytes()
    assert len(list((tmp_path / "s" / "runs").iterdir())) == 2
    assert do(tmp_path / "s", *wanted) == [], "what is finished is not done again"


def test_what_fails_is_noted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("def data():\n    raise ValueError('the disk is away')\n")
    monkeypatch.chdir(tmp_path)  # where module:callable is looked up
    events = do(tmp_path / "s", tiny(data="broken:data"), tiny(seed=1))
    assert [event.what for event in events if event.what != "round"] == ["failed", "finished"], "the others go on"
    noted = json.loads((tmp_path / "s" / "failed.json").read_text())
    assert [about["why"] for about in noted.values()] == ["the disk is away"]
    (tmp_path / "broken.py").write_text("from fedlesam.data import load\ndef data():\n    return load('digits')\n")
    assert [event.what for event in do(tmp_path / "s", tiny(data="broken:data"))][-1] == "finished"
    assert json.loads((tmp_path / "s" / "failed.json").read_text()) == {}


def test_a_job_that_dies_fails_its_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run gets a new process; what it prints is not taken for a report."""
    (tmp_path / "deadly.py").write_text("import os\ndef data():\n    os._exit(9)\n")
    (tmp_path / "loud.py").write_text(
        "from fedlesam.data import load\ndef data():\n    print('{hello')\n    return load('digits')\n"
    )
    monkeypatch.chdir(tmp_path)  # where module:callable is looked up
    events = do(tmp_path / "s", tiny(data="deadly:data"), tiny(data="loud:data"))
    ends = {event.what: event for event in events if event.what != "round"}
    assert ends.keys() == {"failed", "finished"}
    assert "exit code 9" in ends["failed"].why
    assert "{hello" in (tmp_path / "s" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"form": 0, "fedlesam": "0.1.0"}, "folder form 0"),
        ({"form": 1, "fedlesam": "99.0"}, "was made by fedlesam 99.0"),
        ({"form": 1}, "does not describe a sweep"),
        ([1], "does not describe a sweep"),
    ],
)
def test_a_folder_of_another_version_is_refused_and_left_alone(tmp_path: Path, about: object, said: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=said) as error:
        do(tmp_path / "s", tiny())
    assert "--out" in str(error.value)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["sweep.json"]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(ValueError, match="not a sweep folder"):
        do(tmp_path, tiny())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    with Sweep(tmp_path / "s").open(), pytest.raises(ValueError, match="is in use"):
        do(tmp_path / "s", tiny())


LONG: dict[str, Value] = {"rounds": 40000, "checkpoint_every": 5, "evaluate_every": 1000}
PROGRAM = """
import json, sys
from pathlib import Path
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.sweep import Sweep
wanted = [configs.resolve(configs.update(RunConfig(), values)) for values in json.loads(sys.argv[2])]
with Sweep(Path(sys.argv[1])).open() as sweep:
    sweep.run([sweep.task(c, c.algorithm) for c in wanted], 2)
"""


def started(path: Path, *wanted: dict[str, Value]) -> "subprocess.Popen[str]":
    """A real sweep whose runs are all beyond their first checkpoint."""
    arguments = [sys.executable, "-c", PROGRAM, str(path), json.dumps(wanted)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    patience = time.monotonic() + 120
    while [metrics.read_text().count("\n") > 6 for metrics in path.glob("runs/*/metrics.jsonl")] != [True] * len(
        wanted
    ):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < patience
        time.sleep(0.05)
    return process


def settled(path: Path) -> list[RunFolder]:
    """The runs, once no process works on them any more."""
    from fedlesam.runs import lock

    folders = [RunFolder(folder) for folder in sorted((path / "runs").iterdir())]
    patience = time.monotonic() + 60
    while any(lock.holder(folder.path) for folder in folders):
        assert time.monotonic() < patience, "a job outlived its sweep"
        time.sleep(0.05)
    return folders


@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGTERM, signal.SIGINT))],
)
def test_stopped_in_the_middle_and_repeated_it_goes_on(tmp_path: Path, signum: signal.Signals) -> None:
    """No job is left behind, whatever ended the sweep; nothing but the round under way is lost."""
    wanted = [{**TINY, **LONG, "seed": seed} for seed in (0, 1)]
    process = started(tmp_path / "s", *wanted)
    process.send_signal(signum)
    process.communicate(timeout=60)
    folders = settled(tmp_path / "s")
    done = [len(folder.read_metrics()) for folder in folders]
    assert all(5 <= rounds < 40000 for rounds in done)
    for folder in folders:
        assert folder.read_summary()["state"] == "interrupted", "with a checkpoint, also where the sweep was killed"

    events: list[Event] = []
    with Sweep(tmp_path / "s").open() as sweep, pytest.raises(Interrupted):
        tasks = [sweep.task(tiny(**values), "again") for values in wanted]

        def first(event: Event) -> None:
            events.append(event)
            raise Interrupted

        sweep.run(tasks, 1, first)
    assert events[0].what == "round" and events[0].round > min(done), "it went on, and did not begin again"
    settled(tmp_path / "s")


def test_an_error_here_leaves_no_job_behind(tmp_path: Path) -> None:
    def wrong(event: Event) -> None:
        raise RuntimeError("no terminal")

    with Sweep(tmp_path / "s").open() as sweep, pytest.raises(RuntimeError, match="no terminal"):
        sweep.run([sweep.task(tiny(**LONG), "long")], 1, wrong)
    (folder,) = settled(tmp_path / "s")
    assert folder.read_summary()["state"] == "interrupted"


def test_a_run_with_probes_serves_those_who_want_none(tmp_path: Path) -> None:
    sweep, config = Sweep(tmp_path), tiny()
    plain = sweep.folder_of(config)
    measured = plain.with_name(plain.name + "-drift-every-1")
    measured.mkdir(parents=True)
    (measured / "summary.json").write_text('{"state": "interrupted"}')
    assert sweep.folder_of(config) == plain
    (measured / "summary.json").write_text('{"state": "finished"}')
    assert sweep.folder_of(config) == measured
    assert sweep.is_done(Task(config, measured, ""))

"""`fedlesam runs`: what it folds, how it sorts, and that names can be copied."""

import json
import os
from pathlib import Path

import pytest
from command_line import Call
from fake_runs import fake_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run, a comparison of two methods with two seeds, and a sweep whose runs are one level deeper."""
    fake_run(tmp_path / "runs" / "alone", "fedsmoo", rounds=12)
    for seed in (0, 1):
        fake_run(tmp_path / "runs" / "pair" / f"fedavg-seed{seed}", "fedavg", seed=seed, rounds=20)
        fake_run(
            tmp_path / "runs" / "pair" / f"scaffold-seed{seed}", "scaffold", seed=seed, rounds=20, finished=seed == 0
        )
        fake_run(
            tmp_path / "runs" / "tune" / "runs" / f"fedsam-digits-{'0123456789abcdef' * 4}{seed}", "fedsam", seed=seed
        )
    for age, name in enumerate(("pair", "alone", "tune")):
        for path in (tmp_path / "runs" / name).rglob("*.*"):
            os.utime(path, (1e9 - age, 1e9 - age))
    return tmp_path / "runs"


def first(out: str) -> list[str]:
    rows = out.partition("\n\n")[0].splitlines()[1:]
    return [row.split()[0] for row in rows if not row.startswith(" ")]


def test_comparisons_and_sweeps_are_a_line_each(call: Call, runs: Path) -> None:
    done = call("runs")
    assert first(done.out) == ["alone", "pair", "tune"]
    line = next(line for line in done.out.splitlines() if line.startswith("pair"))
    assert "fedavg, scaffold; 4 runs" in line
    assert "3 finished" in line
    assert "80/80" in line
    assert "test of scaffold" in line, "the best, and whose it is"
    assert len(first(call("runs", "--all").out)) == 7
    assert len(json.loads(call("runs", "--json").out)) == 7


def test_small_checkpoints_have_a_size(call: Call, runs: Path) -> None:
    (runs / "alone" / "checkpoints").mkdir()
    (runs / "alone" / "checkpoints" / "round000012.safetensors").write_bytes(bytes(21_500))
    lines = {line.split()[0]: line.split() for line in call("runs").out.splitlines() if line.strip()}
    assert lines["alone"][-1] == "21.5kB" and lines["tune"][-1] == "-"


def test_the_folder_of_a_sweep_has_a_line_for_each_of_its_runs(call: Call, runs: Path) -> None:
    assert first(call("runs", "runs/pair").out) == ["fedavg-seed0", "fedavg-seed1", "scaffold-seed0", "scaffold-seed1"]
    names = first(call("runs", "runs/tune").out)
    assert [len(Path(name).name) for name in names] == [len("fedsam-digits-") + 65] * 2, "no name is broken"


def test_sorted_by_time_or_by_score(call: Call, runs: Path) -> None:
    assert first(call("runs", "--sort", "newest").out) == ["pair", "alone", "tune"]
    best = {"pair": "scaffold-seed", "alone": "", "tune": ""}
    found = first(call("runs", "--sort", "score", "--all").out)
    assert found[0].startswith(f"pair/{best['pair']}"), "twenty rounds of the quickest method"
    assert found[-1].startswith("tune/")

"""What the report finds in run folders, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from fake_runs import fake_run
from safetensors.numpy import save_file

from fedlesam.runs.read import find_runs, read_run


def test_runs_and_folders_of_runs_each_once(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "many" / "a"), fake_run(tmp_path / "many" / "b", "fedsam")
    c = fake_run(tmp_path / "c", "scaffold")
    (tmp_path / "many" / "accuracy.png").write_bytes(b"")
    found = find_runs([tmp_path / "many", c, tmp_path / "c", a / ".." / "b"])
    assert [run.path for run in found] == [a, b, c]


def test_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder, and holds none"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match="there is no such folder"):
        find_runs([tmp_path / "x"])


def test_accuracy_of_a_run_under_way(tmp_path: Path) -> None:
    """By the same definition as of a finished one."""
    done, under_way = fake_run(tmp_path / "a", rounds=15), fake_run(tmp_path / "b", rounds=15, finished=False)
    ours, theirs = read_run(under_way).accuracy, read_run(done).accuracy
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs)
    assert (read_run(done).finished, read_run(under_way).finished) == (True, False)


def test_probes_are_read_in_the_order_of_rounds(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "x")
    lines = [
        {"round": 9, "probe": "drift", "values": {"pd": 0.5, "note": "text"}, "about": {"samples": 10}, "seconds": 1},
        {"round": 3, "probe": "drift", "values": {"pd": 0.25}, "about": {"samples": 10}, "seconds": 1},
        {"round": 9, "probe": "drift", "values": {"pd": 0.75}, "about": {"samples": 10}, "seconds": 1},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"round": 10, "pro'
    (folder / "probes.jsonl").write_text(text)
    found = read_run(folder).measurements
    assert [(one.round, one.values) for one in found] == [(3, {"pd": 0.25}), (9, {"pd": 0.75})], "the last of a state"
    assert [one.metadata for one in found] == [{"samples": 10}] * 2, "called `about` in older files"
    assert read_run(fake_run(tmp_path / "y")).measurements == []


@pytest.mark.parametrize("line", ['{"round": 1}', "[]", '{"round": "x", "probe": "p", "values": {}}', "nonsense}"])
def test_a_bad_probe_line_is_named(tmp_path: Path, line: str) -> None:
    folder = fake_run(tmp_path / "x")
    (folder / "probes.jsonl").write_text(f'{{"round": 1, "probe": "p", "values": {{}}}}\n{line}\n{{}}\n')
    with pytest.raises(ValueError, match=r"probes.jsonl, line 2: is not a measurement of a probe"):
        _ = read_run(folder).measurements


def test_surfaces(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "x", probes=True)
    flat, line = read_run(folder).surface(2), read_run(folder).surface(1)
    assert flat is not None
    assert line is not None
    assert (flat.loss.shape, line.loss.shape) == ((25, 25), (25,))
    assert flat.metadata == {"seed": 0, "samples": 1000}
    assert np.array_equal(flat.loss[12], line.loss)
    assert read_run(fake_run(tmp_path / "y")).surface(2) is None


def test_bad_surfaces_are_named(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "x")
    path = folder / "surface-2d.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"surface-2d.safetensors: is not a loss surface"):
        read_run(folder).surface(2)
    save_file({"x": np.zeros(3), "y": np.zeros(2), "loss": np.zeros((3, 2)), "accuracy": np.zeros((3, 2))}, path)
    with pytest.raises(ValueError, match=r"loss has the shape \(3, 2\), not \(3, 3\)"):
        read_run(folder).surface(2)

"""Runs side by side."""

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedlesam.report.ranking import Row, ranking
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run, read_run


def run(algorithm: str, seed: int, accuracy: tuple[float, float, float] | None, passes: int, rounds: int = 2) -> Run:
    found = {"accuracy": dict(zip(("last", "mean_of_last", "best"), accuracy, strict=True))} if accuracy else {}
    record = {"backward_passes": passes, "bytes_down": 3_000_000, "bytes_up": 1_000_000, "seconds": 0.5}
    records = [{"round": t, **record} for t in range(rounds)]
    return Run(Path("x"), RunConfig(algorithm=algorithm, seed=seed), found, records)


def test_best_mean_of_the_last_evaluations_first() -> None:
    rows = ranking(
        [
            run("fedavg", 0, (0.9, 0.5, 0.95), 10),
            run("failed", 0, None, 1),
            run("zero", 0, (0.0, 0.0, 0.0), 1),
            run("fedsam", 0, (0.1, 0.7, 0.8), 20),
            run("scaffold", 0, (0.2, 0.6, 0.9), 10),
        ]
    )
    assert [row.algorithm for row in rows] == ["fedsam", "scaffold", "fedavg", "zero", "failed"]
    assert rows[0] == Row("fedsam", 1, 0.1, 0.7, 0.8, None, 40.0, 8.0, 1.0, 2.0)
    assert (rows[-1].last, rows[-1].mean_of_last, rows[-1].best) == (None, None, None)


def test_means_and_spread_over_seeds() -> None:
    [row] = ranking(
        [
            run("a", 0, (0.1, 0.3, 0.5), 10, rounds=1),
            run("a", 1, (0.3, 0.5, 0.9), 10, rounds=3),
            run("a", 2, (0.2, 0.1, 0.1), 30, rounds=2),
        ]
    )
    assert row.seeds == 3
    assert row.last == pytest.approx(0.2)
    assert row.mean_of_last == pytest.approx(0.3)
    assert row.best == pytest.approx(0.5)
    assert row.spread == pytest.approx(0.2)
    assert row.spread == pytest.approx(stdev([0.3, 0.5, 0.1]))
    assert row.backward_passes == pytest.approx((10 + 30 + 60) / 3)
    assert row.megabytes == pytest.approx((4 + 12 + 8) / 3)
    assert row.seconds == pytest.approx((0.5 + 1.5 + 1.0) / 3)
    assert row.rounds == 2


def test_gains_over_the_first_method_are_paired_by_seed() -> None:
    """Differences .1, .2 and .3 on the seeds both have: mean .2, deviation .1, t(2) = 4.3027."""
    runs = [run("fedsam", seed, (a, a, a), 10) for seed, a in ((0, 0.5), (1, 0.1), (2, 0.3))]
    runs += [run("fedavg", seed, (a, a, 0.9), 10) for seed, a in ((2, 0.6), (0, 0.6), (5, 0.0), (1, 0.3))]
    runs += [run("alone", 1, (0.0, 0.0, 0.0), 10)]
    rows = {row.algorithm: row for row in ranking(runs)}
    assert not rows["fedsam"].gains and not rows["alone"].gains, "the first method itself, and one common seed"
    gain = rows["fedavg"].gains["last"]
    half = 4.302653 * 0.1 / 3**0.5
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-6)
    assert gain.seeds == 3 and gain == rows["fedavg"].gains["mean_of_last"]
    assert rows["fedavg"].gains["best"].mean == pytest.approx(0.6)
    assert rows["fedsam"].spreads == pytest.approx(dict.fromkeys(("last", "mean_of_last", "best"), 0.2))


def test_a_seed_without_accuracy_is_left_out_of_it() -> None:
    [row] = ranking([run("a", 0, (0.1, 0.3, 0.5), 10), run("a", 1, None, 10)])
    assert (row.seeds, row.mean_of_last, row.spread) == (2, 0.3, None)


def write_folder(path: Path, records: list[dict[str, Any]]) -> Path:
    path.mkdir()
    (path / "config.toml").write_text(configs.write(RunConfig(algorithm="fedsam")))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_runs_are_read_from_their_folders(tmp_path: Path) -> None:
    records = [{"round": 0, "a": 1.5}, {"round": 1, "a": 2.0, "test_accuracy": 0.25}, {"round": 2, "a": 1.0}]
    found = read_run(write_folder(tmp_path / "x", records))
    assert found.algorithm == "fedsam"
    assert found.curve("test_accuracy") == ([2], [0.25]), "rounds done, not round numbers"
    assert found.curve("a") == ([1, 2, 3], [1.5, 2.0, 1.0])
    assert found.total("a") == 4.5
    assert found.accuracy["mean_of_last"] == 0.25, "an unfinished run, so far"
    assert found.class_counts() is None
    save_file({"class_counts": torch.tensor([[1, 2], [3, 4]])}, tmp_path / "x" / "split.safetensors")
    assert np.array_equal(found.class_counts(), [[1, 2], [3, 4]])  # type: ignore[arg-type]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: is not a run folder, it has no config.toml"):
        read_run(tmp_path)

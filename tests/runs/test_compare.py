"""Several methods on the same clients, batches and first model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedlesam.report import pictures
from fedlesam.report.ranking import ranking
from fedlesam.runs import compare as comparison
from fedlesam.runs.compare import compare, parse_method, plan
from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run

TINY = RunConfig(clients=6, active=2, rounds=2, epochs=1, batch_size=50, model="mlp:hidden=4", threads=1)


def test_hyper_parameters_go_to_those_who_take_them() -> None:
    base = dataclasses.replace(TINY, hyper={"rho": 0.3, "alpha": 0.2})
    plans = {
        config.algorithm: config.hyper for config in plan(base, ["fedavg", "fedsam", "mofedsam", "fedcm"], 1).values()
    }
    assert plans == {
        "fedavg": {"lr_g": 1.0},
        "fedsam": {"rho": 0.3, "lr_g": 1.0},
        "mofedsam": {"rho": 0.3, "alpha": 0.2, "lr_g": 1.0},
        "fedcm": {"alpha": 0.2, "lr_g": 1.0},
    }


def test_one_that_nobody_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="none of fedavg, fedsam takes alpha"):
        plan(dataclasses.replace(TINY, hyper={"alpha": 0.3}), ["fedavg", "fedsam"], 1)


def test_seeds_and_each_methods_own_decay() -> None:
    plans = plan(dataclasses.replace(TINY, seed=4), ["fedavg", "feddyn"], 2)
    assert [(p.algorithm, p.seed, p.lr_decay) for p in plans.values()] == [
        ("fedavg", 4, 0.998),
        ("fedavg", 5, 0.998),
        ("feddyn", 4, 0.9995),
        ("feddyn", 5, 0.9995),
    ]
    assert list(plans) == ["fedavg-seed4", "fedavg-seed5", "feddyn-seed4", "feddyn-seed5"]


def test_bad_plans() -> None:
    with pytest.raises(ValueError, match="a method is named twice: fedavg, fedavg"):
        plan(TINY, ["fedavg", "fedavg"], 1)
    with pytest.raises(ValueError, match="unknown algorithm 'fedag': did you mean 'fedavg'"):
        plan(TINY, ["fedsam", "fedag"], 1)


def first_records(folder: Path) -> dict[str, Any]:
    first: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    return first


def test_the_same_clients_batches_and_first_model(tmp_path: Path) -> None:
    """Methods that only differ from the second round on are equal in the first."""
    plans = plan(TINY, ["fedavg", "scaffold", "fedlesam"], 1)
    runs = compare(plans, tmp_path)
    assert [run.algorithm for run in runs] == ["fedavg", "scaffold", "fedlesam"]
    firsts = [first_records(tmp_path / name) for name in plans]
    for key in ("active", "train_loss", "test_loss", "test_accuracy"):
        assert firsts[0][key] == firsts[1][key] == firsts[2][key]
    seconds = [run.records[1]["train_loss"] for run in runs]
    assert seconds[0] != seconds[1]
    splits = {(tmp_path / name / "split.safetensors").read_bytes() for name in plans}
    assert len(splits) == 1


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    compare(plan(TINY, ["fedavg"], 1), tmp_path)
    model = tmp_path / "fedavg-seed0" / "model.safetensors"
    before = model.stat().st_mtime_ns
    watched = []
    runs = compare(
        plan(TINY, ["fedavg", "fedsam"], 1),
        tmp_path,
        watch=lambda _, config: watched.append(config.algorithm),  # type: ignore[func-returns-value]
    )
    assert watched == ["fedsam"]
    assert model.stat().st_mtime_ns == before
    assert [len(run.records) for run in runs] == [2, 2]


def test_all_is_checked_before_anything_is_trained(tmp_path: Path) -> None:
    """The first method could do it, the second cannot."""
    base = dataclasses.replace(TINY, weighting="examples")
    with pytest.raises(ValueError, match="weighting by examples does not work with ControlVariates"):
        compare(plan(base, ["fedavg", "scaffold"], 1), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    compare(plan(TINY, ["fedsam"], 1), tmp_path / "x")
    with pytest.raises(ValueError, match="holds another run"):
        compare(plan(dataclasses.replace(TINY, lr=0.3), ["fedavg", "fedsam"], 1), tmp_path / "x")
    assert not (tmp_path / "x" / "fedavg-seed0").exists()


def test_data_are_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = comparison.load_data, []

    def counting(config: RunConfig) -> Any:
        loaded.append(config.data)
        return load(config)

    monkeypatch.setattr(comparison, "load_data", counting)
    monkeypatch.setattr("fedlesam.runs.build.load_data", counting)
    compare(plan(TINY, ["fedavg", "fedsam"], 2), tmp_path)
    assert loaded == ["digits"]
    compare(plan(TINY, ["fedavg", "fedsam"], 2), tmp_path)
    assert loaded == ["digits"], "not at all where all runs are done"


def test_pictures_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    real = pictures.accuracy_curves
    monkeypatch.setattr(
        pictures,
        "accuracy_curves",
        lambda runs, path, title: titles.append(title) or real(runs, path, title),
    )
    base = dataclasses.replace(TINY, split="pooled", clients=None, active=1)
    drawn = pictures.comparison(compare(plan(base, ["fedavg"], 1), tmp_path), tmp_path)
    assert drawn == [tmp_path / "accuracy.png", tmp_path / "split.png"]
    assert titles == ["digits, mlp:hidden=4, pooled, 1 clients, 1 active"]
    for path in drawn:
        with Image.open(path) as image:
            image.load()
            assert len(image.convert("RGB").getcolors(10**6)) > 10


@pytest.mark.parametrize(("active", "words"), [(0.1, "10 % active"), (3, ", 3 active")])
def test_share_of_active_clients_is_named(
    active: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def draw(runs: list[Run], path: Path, title: str) -> Path:
        titles.append(title)
        return path

    monkeypatch.setattr(pictures, "accuracy_curves", draw)
    pictures.comparison([Run(tmp_path, dataclasses.replace(TINY, active=active), {}, [])], tmp_path)
    assert titles[0].endswith(words)


def test_a_users_method_has_a_folder_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours.py").write_text("from fedlesam.algorithms import fedavg as method")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(plan(dataclasses.replace(TINY, seed=2), ["ours:method"], 1)) == ["ours-method-seed2"]


def test_a_method_may_have_values_of_its_own(tmp_path: Path) -> None:
    base = dataclasses.replace(TINY, hyper={"rho": 0.3})
    plans = plan(base, ["fedavg", "fedsam", "fedsam:rho=0.05", "fedsam:rho=0.2,lr_g=0.5"], 1)
    hypers = {name: dict(config.hyper) for name, config in plans.items()}
    assert hypers == {
        "fedavg-seed0": {"lr_g": 1.0},
        "fedsam-seed0": {"rho": 0.3, "lr_g": 1.0},
        "fedsam-rho-0.05-seed0": {"rho": 0.05, "lr_g": 1.0},
        "fedsam-rho-0.2-lr_g-0.5-seed0": {"rho": 0.2, "lr_g": 0.5},
    }
    runs = compare(plans, tmp_path)
    rows = {row.algorithm: row.hyper for row in ranking(runs)}
    assert sorted(rows.values()) == ["lr_g=1", "rho=0.05, lr_g=1", "rho=0.2, lr_g=0.5", "rho=0.3, lr_g=1"]
    assert len(rows) == 4, "each with a label of its own"


def test_methods_with_values_are_parsed() -> None:
    assert parse_method("fedsam") == ("fedsam", {})
    assert parse_method("fedsam:rho=0.05") == ("fedsam", {"rho": 0.05})
    assert parse_method("my.module:make") == ("my.module:make", {})
    assert parse_method("my.module:make:rho=1,kind=a") == ("my.module:make", {"rho": 1.0, "kind": "a"})
    with pytest.raises(ValueError, match="expected NAME:KEY=VALUE"):
        parse_method("fedsam:rho=0.1,lr_g")
    with pytest.raises(ValueError, match="a method is named twice"):
        plan(TINY, ["fedsam", "fedsam:rho=0.01"], 1)
    with pytest.raises(ValueError, match="fedavg has no rho; it takes lr_g"):
        plan(TINY, ["fedavg:rho=0.1"], 1)

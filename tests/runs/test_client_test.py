"""--client-test: a share of every client's samples, from the command to the tables."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedlesam as fl
from fedlesam.data.dataset import Images
from fedlesam.data.splits import load_split, make_split, save_split
from fedlesam.federation import Record
from fedlesam.report.groups import compare_runs
from fedlesam.report.ranking import ranking
from fedlesam.report.summaries import tables_of
from fedlesam.report.write import write_report
from fedlesam.runs import config as configs
from fedlesam.runs.build import build
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.read import find_runs, read_run
from fedlesam.runs.runner import execute
from fedlesam.runs.trackers import numbers


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 12, "active": 3, "rounds": 3, "epochs": 1, "batch_size": 20, "model": "mlp:hidden=8"}
    return configs.resolve(
        RunConfig(**{"algorithm": "fedlesam-s", "threads": 1, "client_test": 0.25, **small, **change})
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("runs")
    execute(tiny(), path / "one")
    execute(tiny(seed=1), path / "two")
    yield path


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def test_a_run_says_how_good_its_model_is_on_each_clients_own_samples(folder: Path) -> None:
    run = read_run(folder / "one")
    experiment = build(run.config)
    model, values = run.model, []
    for shard in experiment.split.test_shards(experiment.data) or ():
        x, y = shard.tensors()
        values.append(float((model(x).argmax(1) == y).double().mean()))
    found = lines(folder / "one")[-1]["test_clients"]["accuracy"]
    assert found["mean"] == pytest.approx(np.mean(values)) and found["spread"] == pytest.approx(np.std(values))
    assert found["worst_tenth"] == pytest.approx(min(values)) and "untested" not in found
    assert run.summary["test_clients"]["accuracy"] == found
    assert "test_accuracy" in lines(folder / "one")[-1]  # on the data set's own test samples


def test_no_client_trains_on_what_any_is_tested_on(folder: Path) -> None:
    experiment = build(read_run(folder / "one").config)
    trained, tested = (np.concatenate(part) for part in (experiment.split.clients, experiment.split.tests))
    assert not set(trained) & set(tested) and 0.2 < len(tested) / (len(tested) + len(trained)) < 0.3
    assert [len(shard) for shard in experiment.federation.clients] == list(experiment.split.sizes)
    whole = make_split("dirichlet:0.1", experiment.data, 12, 0)
    for before, train, test in zip(whole, experiment.split.clients, experiment.split.tests, strict=True):
        assert sorted([*train, *test]) == sorted(before)
    saved = load_split(RunFolder(folder / "one").split, experiment.data)
    assert saved.hash == experiment.split.hash and saved.dropped == whole.dropped


def test_the_same_bits_on_two_workers_after_a_crash_and_with_a_probe(folder: Path, tmp_path: Path) -> None:
    execute(tiny(workers=2), tmp_path / "two")
    assert lines(tmp_path / "two") == lines(folder / "one")

    def crash(record: Record) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(tiny(probe="sharpness:every=2"), tmp_path / "crashed", watch=crash)
    execute(tiny(probe="sharpness:every=2"), tmp_path / "crashed")
    assert lines(tmp_path / "crashed") == lines(folder / "one")


def test_ranking_tables_page_and_trackers_have_them(folder: Path, tmp_path: Path) -> None:
    runs = find_runs([folder])
    [row] = ranking(runs)
    ends = [run.records[-1]["test_clients"]["accuracy"] for run in runs]
    for part in ("mean", "worst_tenth", "spread"):
        assert row.clients[part] == pytest.approx(np.mean([end[part] for end in ends]))
        assert row.client_spreads[part] == pytest.approx(np.std([end[part] for end in ends], ddof=1))
    [table] = [table for table in tables_of(compare_runs(runs), []) if table.key == "clients"]
    mean = [column.name for column in table.columns].index("mean over clients")
    assert table.rows[0][mean] == pytest.approx(100 * row.clients["mean"])
    write_report(runs, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Accuracy of clients" in page and "worst tenth of the clients" in page
    fed = build(tiny()).federation
    assert "test_clients/accuracy/worst_tenth" in numbers(fed.round())


def test_runs_without_it_have_none_of_it(tmp_path: Path) -> None:
    execute(tiny(client_test=None, rounds=1), tmp_path / "run")
    runs = find_runs([tmp_path])
    assert not ranking(runs)[0].clients and "clients" not in {t.key for t in tables_of(compare_runs(runs), [])}


def test_a_natural_split_brings_the_test_samples_of_its_clients(tmp_path: Path) -> None:
    digits = fl.data.load("digits")
    owners = [np.array([0, 1, 2, 3]), np.array([], dtype=np.int64), np.array([4, 5])]
    clients = [np.arange(10), np.arange(10, 30), np.arange(30, 35)]
    split = fl.data.Split("natural", clients, len(digits.train), tests=owners, tests_in="test")
    tests = split.test_shards(digits)
    assert tests is not None and tests[1] is None and torch.equal(tests[2].labels(), digits.test.y[4:6])  # type: ignore
    save_split(split, digits, tmp_path / "split.safetensors")
    read = load_split(tmp_path / "split.safetensors", digits)
    assert read.hash == split.hash and [list(own) for own in read.tests or ()] == [list(own) for own in owners]
    with pytest.raises(ValueError, match="its clients have test samples of their own"):
        split.hold_out(0.2)
    small = replace(digits, test=Images(digits.test.x[:3], digits.test.y[:3]))
    with pytest.raises(ValueError, match="clients' test samples are not those of digits"):
        load_split(tmp_path / "split.safetensors", small)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"client_test": 1.5}, r"--client-test must be a share above 0 and below 1, e.g. 0.2, got 1.5"),
        ({"split": "dirichlet:0.1,repeat"}, r"samples belong to more than one client.*without repeat"),
    ],
)
def test_bad_shares_are_refused_before_anything_is_written(change: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        execute(tiny(**change), tmp_path / "run")
    assert not (tmp_path / "run").exists()

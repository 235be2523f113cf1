"""Runs of other tasks than classification: their files, their order, their targets, and what is refused."""

import contextlib
import inspect
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedlesam.cli import cli
from fedlesam.report.groups import compare_runs
from fedlesam.report.ledger import default_targets, group_to_target
from fedlesam.report.ranking import rank
from fedlesam.report.summaries import tables_of
from fedlesam.runs.evaluated import Measure, measure_of, scores
from fedlesam.runs.read import read_run


def prices() -> object:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=draw, dtype=torch.float64)
    y = x[:, :1] * 2 + 0.1 * torch.randn(90, 1, generator=draw, dtype=torch.float64)
    return (x[:60], y[:60]), (x[60:], y[60:])


def text() -> object:
    tokens = torch.arange(60 * 5).view(60, 5) % 7
    return (tokens[:40, :-1], tokens[:40, 1:]), (tokens[40:, :-1], tokens[40:, 1:])


def speaker() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))


def worst(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().max()


def fails(outputs: Tensor, targets: Tensor) -> float:
    raise ZeroDivisionError("no samples of class 3")


def pairs() -> object:
    """A dict of several inputs."""
    draw = torch.Generator().manual_seed(0)
    user, item = torch.randn(90, 3, generator=draw), torch.randn(90, 4, generator=draw)
    both = {"user": user, "item": item, "labels": (user[:, 0] > 0).long()}
    return {name: part[:60] for name, part in both.items()}, {name: part[60:] for name, part in both.items()}


def nested() -> object:
    """The same as a nested tuple."""
    train, test = pairs()
    return tuple(((part["user"], part["item"]), part["labels"]) for part in (train, test))


def ragged() -> object:
    train, test = pairs()
    return train, {**test, "item": test["item"][:5]}


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.user(user) + self.item(item)


HEAD = "import torch\nfrom torch import Tensor, nn\nimport fedlesam as fl\n"
TREES = (pairs, nested, ragged, Towers)
TAIL = "worst = fl.Metric(worst, better='smaller')\nnumber = 3\n"


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's module, in the folder where the command is called."""
    parts = [inspect.getsource(part) for part in (prices, text, speaker, worst, fails, *TREES)]
    (tmp_path / "mine_for_tasks.py").write_text("\n".join([HEAD, *parts, TAIL]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine_for_tasks", None)


COMMON = ["--split", "iid", "--clients", "4", "--active", "2", "--batch-size", "5", "--epochs", "1", "--lr", "0.05"]
REGRESSION = ["--task", "regression", "--data", "mine_for_tasks:prices", "--model", "mlp:hidden=4", *COMMON]


def fedlesam(*args: str) -> str:
    """What a command printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert not cli.main(list(args), standalone_mode=False)
    return out.getvalue()


def test_a_run_of_another_task(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = fedlesam("run", *REGRESSION, "--metric", "mine_for_tasks:worst", "--rounds", "3", "--out", str(out))
    assert "test worst, last round: " in said
    assert "test mae, last evaluation: " in said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert list(lines[0]["metrics"]) == ["worst", "mae"]
    assert lines[0]["smaller"] == ["worst", "mae"]
    run = read_run(out)
    assert run.measure == Measure("worst", smaller=True)
    assert run.scores["last"] == lines[-1]["metrics"]["worst"]
    assert run.scores["best"] == min(line["metrics"]["worst"] for line in lines)
    assert run.accuracy == {}
    assert run.model(torch.randn(2, 4)).shape == (2, 1)
    assert 'task = "regression"' in (out / "config.toml").read_text()
    assert "worst " in fedlesam("runs", str(tmp_path))
    fedlesam(
        "report", str(out), "--target", "3", "--out", str(tmp_path / "page.html"), "--figures", str(tmp_path / "f")
    )
    page = (tmp_path / "page.html").read_text()
    assert "Test worst, best first" in page
    assert "Cost to a target test worst" in page
    assert (tmp_path / "f" / "worst.png").exists()
    assert (tmp_path / "f" / "mae.png").exists()


def test_tokens_stay_whole_numbers(tmp_path: Path) -> None:
    model = ["--model", "mine_for_tasks:speaker", "--data", "mine_for_tasks:text"]
    fedlesam("run", "--task", "language_model", *model, *COMMON, "--rounds", "2", "--out", str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert run.measure == Measure("perplexity", smaller=True)
    assert list(run.records[0]["metrics"]) == ["perplexity", "token_accuracy"]
    data = run.federation().clients[0].tensors()
    assert data[0].dtype == data[1].dtype == torch.int64


def test_data_of_several_inputs(tmp_path: Path) -> None:
    """A dict and a nested tuple of the same tensors learn the same, also from samples held out and clients tested."""
    for name in ("pairs", "nested"):
        data = ["--data", f"mine_for_tasks:{name}", "--model", "mine_for_tasks:Towers", "--held-out", "9"]
        common = ["--split", "dirichlet:1", *COMMON[2:], "--client-test", "20%", "--rounds", "2"]
        fedlesam("run", *data, *common, "--out", str(tmp_path / name))
    one, other = (read_run(tmp_path / name) for name in ("pairs", "nested"))
    assert [r["test_accuracy"] for r in one.records] == [r["test_accuracy"] for r in other.records]
    assert one.records[-1]["test_clients"] == other.records[-1]["test_clients"]
    assert set(one.federation().clients[0].tensors()) == {"user", "item", "labels"}
    assert one.summary["split"]["hash"] == other.summary["split"]["hash"]
    with pytest.raises(ValueError, match=r"data 'mine_for_tasks:ragged': test: .* has 30 samples and .* has 5"):
        fedlesam("run", "--data", "mine_for_tasks:ragged", "--model", "mine_for_tasks:Towers", *COMMON)


def test_a_folder_whose_run_had_another_task(tmp_path: Path) -> None:
    fedlesam("run", *REGRESSION, "--rounds", "1", "--out", str(tmp_path / "run"))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    other = ["binary" if word == "regression" else word for word in REGRESSION]
    with pytest.raises(ValueError, match=r"task: you gave (binary|regression), the folder has (binary|regression)"):
        fedlesam("run", *other, "--rounds", "1", "--out", str(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--task", "regresion"], "unknown task.*did you mean.*regression"),
        (["--task", "mine_for_tasks:number"], "task mine_for_tasks:number: must be an fl.Task, or make one"),
        (["--metric", "f2"], "unknown metric"),
        (["--metric", "mine_for_tasks:number"], r"must be a function of \(outputs, targets\), or an fl.Metric, got 3"),
        (["--metric", "mine_for_tasks:fails"], "the metric fails raises ZeroDivisionError: no samples of class 3"),
        (["--split", "dirichlet:0.1"], "needs a class number for each sample.*use iid, pooled or by:FILE"),
        (["--task", "classification"], "y is torch.float32, and the default loss|the model has one output"),
    ],
)
def test_what_is_refused(args: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"(?s){says}"):
        fedlesam("run", *REGRESSION, *args, "--rounds", "1", "--out", str(tmp_path / "run"))


def test_smaller_is_first_in_a_comparison_and_a_search(tmp_path: Path) -> None:
    out = tmp_path / "c"
    methods = ["fedavg", "fedsam", "--seeds", "2"]
    said = fedlesam("compare", *methods, *REGRESSION, "--rounds", "2", "--out", str(out))
    assert "Test mae: of the last round, of the last 10 evaluations, of the best round. Smaller is better." in said
    assert "Below 0 is better" in said
    runs = [read_run(path) for path in sorted(out.glob("*-seed*"))]
    comparison = compare_runs(runs)
    rows = rank((group.label, group.runs) for group in comparison.groups)
    assert rows[0].mean_of_last <= rows[1].mean_of_last
    far, near = default_targets(comparison)
    assert far > near
    assert group_to_target(comparison.groups[0], 1e9).reached == 2
    assert group_to_target(comparison.groups[0], -1.0).reached == 0
    titles = [table.title for table in tables_of(comparison, [far])]
    assert "Test mae, best first" in titles
    said = fedlesam("tune", "--over", "lr=0.001,0.1", *REGRESSION[:-2], "--rounds", "2", "--out", str(tmp_path / "t"))
    assert "held-out mae, mean of the last 10 evaluations" in said
    table = [float(line.split()[1]) for line in said.splitlines()[1:3]]
    assert table == sorted(table)
    assert "lr = 0.1" in (tmp_path / "t" / "best.toml").read_text()


def test_measures_by_hand() -> None:
    records = [
        {"round": t, "test_loss": 1.0, "metrics": {"ppl": v}, "smaller": ["ppl"]} for t, v in enumerate([3, 1, 2])
    ]
    assert scores(records)["score"] == {
        "metric": "ppl",
        "better": "smaller",
        "last": 2,
        "mean_of_last": 2,
        "evaluations_in_mean": 3,
        "best": 1,
        "best_round": 1,
    }
    assert measure_of([{"round": 0, "test_loss": 1.0}]) == Measure("loss", smaller=True)
    assert measure_of([{"round": 0, "metrics": {"auc": None}}]) == Measure("auc")
    assert Measure("token_accuracy").show(0.5) == "50.00"
    assert Measure("ppl").show(80.123) == "80.12"
    assert Measure().target(80) == Measure().target(0.8) == 0.8
    with pytest.raises(ValueError, match="an accuracy is above 0 and at most 100%"):
        Measure().target(101)

"""The paper's tables, at the smallest scale, through the command line."""

import csv
import dataclasses
import html
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run
from fedlesam.runs.sweep import Sweep, Task, Watch
from reproduction import plan, tables
from reproduction.context import Context
from reproduction.items import ITEMS, SETTINGS, RunSpec
from reproduction.page import page
from reproduction.paper import paper_tables
from reproduction.plan import Only, parse_only
from reproduction.reproduce import Request, reproduce
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.results import Results
from reproduction.scales import CHOICES, DOMAIN_CHOICES, SCALES, settle
from reproduction.studies import NAMES
from reproduction.writing import latex, markdown, table_csv

Call = Callable[..., int | str | None]

ROOT = Path(__file__).parents[2]
SMOKE = SCALES["smoke"]


def test_two_items_at_smoke_scale(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table and a figure in every form; all of the paper is done by the slow test below."""
    code, said = call("table8", "fig5", "--scale", "smoke", "--jobs", "2", "--out", str(tmp_path)), capsys.readouterr()
    assert not code, said.err
    assert all(f"## {name}: " in said.out for name in ("table8", "fig5"))
    assert "reduction: rounds: 3, not 800" in said.err
    assert shape(rows_of(tmp_path, "table8"), "multiples of FedAvg") == (8, 1)
    assert all(row["ours"] for row in rows_of(tmp_path, "table8"))
    for name in ("table8.md", "table8.tex", "fig5.md", "index.html"):
        text = html.unescape((tmp_path / "results" / name).read_text())
        assert all(sentence in text for sentence in (*SMOKE.reductions, *CHOICES)), name
    assert (tmp_path / "results" / "fig5.png").stat().st_size > 5000
    text = (tmp_path / "results" / "index.html").read_text()
    assert all(f'<section id="{name}">' in text for name in ("table8", "fig5"))
    beside = re.findall(r'(?:src|href)="(?!data:|#)([^"]+)"', text)
    assert beside and all((tmp_path / "results" / name).exists() for name in beside)


@pytest.mark.slow
def test_everything_at_smoke_scale(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m reproduction all --scale smoke`, once; what came of it is looked at from all sides."""
    arguments = ["all", "--scale", "smoke", "--jobs", "2", "--out", str(tmp_path / "s"), "--data-dir", str(tmp_path)]
    code, said = call(*arguments), capsys.readouterr()
    assert not code, said.err
    assert all(f"## {name}: " in said.out for name in ITEMS)
    assert "reduction: rounds: 3, not 800" in said.err
    check_shapes(tmp_path / "s")
    check_cells(tmp_path / "s")
    check_that_methods_differ(tmp_path / "s")
    check_terms(tmp_path / "s")
    check_pictures(tmp_path / "s")
    check_page(tmp_path / "s")
    check_that_nothing_is_repeated(tmp_path / "s")


def test_killed_in_the_middle_and_repeated_it_goes_on(tmp_path: Path) -> None:
    """A real process, SIGKILL: what was finished stays as it is, the rest is done, the table is whole."""
    only = "data=cifar10,clients=100,splits=dirichlet-0.6"
    out = str(tmp_path / "s")
    command = [sys.executable, "-m", "reproduction", "table2", "--only", only, "--out", out, "--quiet"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    finished: list[Path] = []
    while len(finished) < 3:
        assert process.poll() is None, "it was too quick to be killed"
        time.sleep(0.01)
        finished = list(tmp_path.glob("s/runs/*/summary.json"))
    process.kill()
    process.wait()
    assert not (tmp_path / "s" / "results").exists()
    before = {path: path.stat().st_mtime_ns for path in finished}
    assert subprocess.run(command, cwd=ROOT, timeout=300).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in finished}
    assert len(list(tmp_path.glob("s/runs/*/summary.json"))) == 12
    assert all(row["ours"] for row in rows_of(tmp_path / "s", "table2"))


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shape(rows: list[dict[str, str]], part: str) -> tuple[int, int]:
    mine = [row for row in rows if row["part"] == part]
    return len({row["row"] for row in mine}), len({row["column"] for row in mine})


def check_shapes(folder: Path) -> None:
    """They are the paper's."""
    for name in ("table2", "table3"):
        for part, rows in paper_tables()[name].parts.items():
            assert shape(rows_of(folder, name), f"{part}; last round") == (len(rows), len(paper_tables()[name].columns))
    assert shape(rows_of(folder, "table4"), "average accuracy, last round") == (6, 4)
    for name in ("table5", "table9"):
        assert shape(rows_of(folder, name), "multiples of FedAvg") == (6, 6)
    assert shape(rows_of(folder, "table6"), "") == (4, 4)
    assert shape(rows_of(folder, "table7"), "multiples of FedAvg") == (8, 3)
    assert shape(rows_of(folder, "table8"), "multiples of FedAvg") == (8, 1)


def check_cells(folder: Path) -> None:
    """What can be run is filled, and the paper's figure stands beside it."""
    for row in rows_of(folder, "table2"):
        assert 0 < float(row["ours"]) < 100 and not row["missing"]
        part = row["part"].partition(";")[0]
        figure = paper_tables()["table2"].figure(part, row["row"], row["column"])
        assert figure is not None and float(row["paper"]) == figure[0]
    assert all(row["missing"] == "no domains are embedded" and not row["ours"] for row in rows_of(folder, "table3"))


def check_that_methods_differ(folder: Path) -> None:
    """At smoke scale clients are active more than once, so that FedLESAM perturbs."""
    last = {}
    for name in ("fedavg", "fedlesam", "scaffold", "fedlesam-s", "feddyn", "fedlesam-d"):
        (run, *_) = sorted(folder.glob(f"runs/{name}-digits-dirichlet-0.6-repeat-*"))
        last[name] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["train_loss"]
    assert len(set(last.values())) == len(last)


def check_terms(folder: Path) -> None:
    """Every reduction and choice is in every output."""
    for name in ("table2.md", "table2.tex", "fig5.md", "index.html"):
        text = html.unescape((folder / "results" / name).read_text())
        for sentence in (*SMOKE.reductions, *CHOICES):
            assert sentence in text, name


def check_pictures(folder: Path) -> None:
    found = {path.name for path in (folder / "results").glob("*.png")}
    assert {"fig4.png", "fig5.png", "table2-cifar10-dirichlet-0.1-100-clients.png"} <= found
    assert len([name for name in found if name.startswith("table2")]) == 16


def check_page(folder: Path) -> None:
    """It needs no other file."""
    text = (folder / "results" / "index.html").read_text()
    assert all(f'<section id="{name}">' in text for name in ITEMS)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)


def check_that_nothing_is_repeated(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")}
    begun: list[object] = []

    def begin(tasks: Sequence[Task]) -> Watch:
        begun.append(tasks)
        return lambda _: None

    with Sweep(folder).open() as sweep:
        planned = Request(list(ITEMS.values()), SMOKE).plan()
        assert all(sweep.is_done(sweep.task(c, "")) for configs in planned.runs.values() for c in configs)
    reproduce(Request([ITEMS["table5"], ITEMS["table8"]], SMOKE), folder, begin)
    assert not begun
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")}


def test_runs_are_shared_between_tables() -> None:
    alone = [len(plan.make([ITEMS[name]], Only(), SMOKE, 1).runs) for name in ("table2", "table5", "table8", "fig3")]
    together = plan.make([ITEMS[name] for name in ("table2", "table5", "table8", "fig3")], Only(), SMOKE, 1)
    assert alone == [192, 7, 8, 5] and len(together.runs) == 192


def test_a_missing_data_set_leaves_its_cells_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = dataclasses.replace(SMOKE, stand_in="", settings={**SMOKE.settings, "clients": 6})
    monkeypatch.setattr("reproduction.scales.PROTOCOL", {"cifar10": {}, "cifar100": {}})
    real = settle

    def mixed(spec: RunSpec, scale: object, seed: int, data_dir: str | None, workers: int) -> RunConfig | str:
        """CIFAR-10 stands on digits here, CIFAR-100 is to be found."""
        found = real(spec, SMOKE, seed, data_dir, workers)
        if spec.data == "cifar100" and isinstance(found, RunConfig):
            return dataclasses.replace(found, data="cifar100", data_dir=str(tmp_path))
        return found

    monkeypatch.setattr(plan, "settle", mixed)
    request = Request([ITEMS["table2"]], scale, parse_only("methods=fedavg,splits=dirichlet-0.1,clients=100"))
    said: list[str] = []
    (table,) = reproduce(request, tmp_path / "s", log=said.append).tables
    ten, hundred = table.blocks[0].rows["fedavg"]
    assert ten.ours is not None and not ten.missing
    assert hundred.ours is None and hundred.missing.startswith("cifar100: not found") and hundred.paper == 42.64
    assert any("cifar100" in text for text in said)
    assert "| fedavg | " in markdown(table) and "— / 42.64" in markdown(table) and "missing, 1 cell" not in said


def test_a_failed_run_leaves_its_cell_empty_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = settle

    def wrong(spec: RunSpec, *rest: object) -> RunConfig | str:
        found = real(spec, SMOKE, 0, None, 1)
        assert isinstance(found, RunConfig)
        return dataclasses.replace(found, lr=1e30, on_client_error="stop") if spec.method == "fedavg" else found

    monkeypatch.setattr(plan, "settle", wrong)
    only = parse_only("methods=fedavg,scaffold,splits=dirichlet-0.1,clients=100,data=cifar10")
    outcome = reproduce(Request([ITEMS["table2"]], SMOKE, only), tmp_path / "s")
    ((label, why),) = outcome.failed.items()
    assert label.startswith("fedavg") and why
    rows = outcome.tables[0].blocks[0].rows
    assert why in rows["fedavg"][0].missing and rows["scaffold"][0].ours is not None


# the plan


def test_full_scale_is_the_papers_protocol() -> None:
    config = settle(RunSpec("fedlesam-d", "cifar100", "pathological-10", 200, 0.05), SCALES["full"], 2, "d", 4)
    assert isinstance(config, RunConfig)
    expected = {
        "data": "cifar100",
        "model": "resnet18",
        "split": "pathological:10,repeat",
        "clients": 200,
        "active": 0.05,
        "rounds": 800,
        "lr": 0.1,
        "lr_decay": 0.9995,
        "epochs": 2,
        "batch_size": 20,
        "weight_decay": 1e-3,
        "clip_scope": "corrected",
        "samples": None,
        "seed": 2,
        "workers": 4,
        "threads": 1,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.hyper["rho"] == 0.1 and config.hyper["lam"] == 0.1


def test_cpu_scale_is_the_reduction_it_says() -> None:
    config = settle(RunSpec("fedsam", "cifar10", "dirichlet-0.1", 100, 0.1), SCALES["cpu"], 0, None, 1)
    assert isinstance(config, RunConfig)
    assert (config.samples, config.model, config.rounds, config.clients) == (10_000, "cnn", 100, 100)
    assert (config.active, config.epochs, config.batch_size, config.lr) == (0.1, 5, 50, 0.1)
    assert config.split == "dirichlet:0.1,repeat" and config.hyper["rho"] == 0.01


@pytest.mark.parametrize(("scale", "rounds"), [("full", 400), ("cpu", 50)])
def test_centralised_training_sees_as_many_samples(scale: str, rounds: int) -> None:
    config = settle(RunSpec("fedavg", "cifar10", "pooled", 100, 0.1), SCALES[scale], 0, None, 1)
    assert isinstance(config, RunConfig)
    assert (config.split, config.clients, config.active, config.epochs, config.rounds) == (
        "pooled",
        None,
        1.0,
        1,
        rounds,
    )


def test_the_ablation_sets_rho() -> None:
    found = settle(RunSpec("fedlesam-s", "cifar10", "dirichlet-0.1", 100, 0.1, ratio=0.01), SCALES["cpu"], 0, None, 1)
    assert isinstance(found, RunConfig) and found.hyper["rho"] == 0.001
    same = settle(RunSpec("fedlesam-s", "cifar10", "dirichlet-0.1", 100, 0.1, ratio=1.0), SCALES["cpu"], 0, None, 1)
    assert same == settle(RunSpec("fedlesam-s", "cifar10", "dirichlet-0.1", 100, 0.1), SCALES["cpu"], 0, None, 1)


def test_only() -> None:
    found = parse_only("methods=fedavg,fedlesam-s,splits=dirichlet-0.1, clients=200")
    assert found == Only(frozenset({"fedavg", "fedlesam-s"}), frozenset({"dirichlet-0.1"}), clients=frozenset({"200"}))
    planned = plan.make([ITEMS["table2"]], found, SCALES["cpu"], 2)
    assert len(planned.runs) == 4 and all(len(configs) == 2 for configs in planned.runs.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tabel2"], "did you mean 'table2'"),
        (["fig7"], "unknown table or figure 'fig7'"),
        (["table2", "--scale", "cpus"], "did you mean 'cpu'"),
        (["table2", "--only", "methods=fedagv"], "did you mean 'fedavg'"),
        (["table2", "--only", "fedavg"], "unknown selection 'fedavg'"),
        (["table2", "--only", "method=fedavg"], "did you mean 'methods'"),
        ([], "name a table or figure"),
    ],
)
def test_bad_input(
    arguments: list[str],
    said: str,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_names_everything(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """192 cells of table 2 at every scale; at smoke scale both data sets are digits, and some of their runs are one."""
    assert not call("--list")
    said = capsys.readouterr().out
    assert all(re.search(rf"^{name}\s", said, re.M) for name in (*ITEMS, *NAMES))
    assert re.search(r"table2 .* 192 / 19,200 +576 / 460,800", said)


# what is made of runs


def run(method: str, accuracies: list[float], seconds: float = 1.0, sent: int = 2 * 10**9) -> Run:
    records = [
        {"round": i, "test_accuracy": a / 100, "seconds": seconds, "bytes_down": sent, "bytes_up": sent}
        for i, a in enumerate(accuracies)
    ]
    last = {"last": accuracies[-1] / 100, "mean_of_last": accuracies[-1] / 100, "best": max(accuracies) / 100}
    return Run(Path(method), RunConfig(algorithm=method), {"accuracy": last}, records)


def context(results: dict[RunSpec, list[Run]], tmp_path: Path, scale: str = "full") -> Context:
    return Context(Results(SCALES[scale], results, {}, 1), Only(), tmp_path, None)


def test_to_a_target_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg reaches 68 % in its second round and 74 % in its fourth; FedSAM in the first and never."""
    monkeypatch.setattr(tables, "per_round", lambda methods, file: {"fedavg": 30.0, "fedsam": 60.0})
    item = ITEMS["table5"]
    specs = {spec.method: spec for spec in item.specs}
    runs = {
        specs["fedavg"]: [run("fedavg", [60, 68, 67, 75])],
        specs["fedsam"]: [run("fedsam", [70, 60, 60, 73.9], sent=10**9)],
    }
    absolute, others = tables.make(item, context(runs, tmp_path)).blocks
    assert [cell.ours for cell in absolute.rows["fedavg"]] == [2, 4, 2.0, 4.0, 1.0, 2.0]
    fedsam = others.rows["fedsam"]
    assert [cell.ours for cell in fedsam] == [0.5, None, 0.25, None, 1.0, None]
    assert fedsam[1].missing == "the target was not reached" and fedsam[0].paper == 1.02
    assert others.rows["fedsmoo"][0].missing == "not run"


def test_printed_multiples_are_ranked_in_full_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 8 prints seconds: two methods whose multiples of FedAvg agree to two digits are no tie."""
    monkeypatch.setattr(tables, "per_round", lambda methods, file: dict.fromkeys(methods, 1.0))
    item = ITEMS["table8"]
    runs = {spec: [run(spec.method, [50.0])] for spec in item.specs}
    printed = {method: float(row[0][0]) for method, row in paper_tables()["table8"].parts["time"].items()}
    _, relative = tables.make(item, context(runs, tmp_path)).blocks
    for method, (cell,) in relative.rows.items():
        assert cell.paper == printed[method] / printed["fedavg"]


def test_reduced_targets_are_the_same_shares_of_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "per_round", lambda methods, file: dict.fromkeys(methods, 1.0))
    item = ITEMS["table5"]
    specs = {spec.method: spec for spec in item.specs}
    runs = {specs["fedavg"]: [run("fedavg", [30, 34.01, 37.01, 38])]}
    table = tables.make(item, context(runs, tmp_path, "cpu"))
    assert [cell.ours for cell in table.blocks[0].rows["fedavg"][:2]] == [2, 3], "68/76 and 74/76 of 38 are 34 and 37"
    assert "34.00 and 37.00 %" in table.notes[0]


def test_averages_and_gains_by_hand(tmp_path: Path) -> None:
    item = dataclasses.replace(
        ITEMS["table4"], specs=tuple(a for a in ITEMS["table4"].specs if a.method in ("fedavg", "fedlesam"))
    )
    ten = [spec for spec in item.specs if spec.data == "cifar10"]
    runs = {spec: [run(spec.method, [50.0 if spec.method == "fedavg" else 53.0])] for spec in ten}
    half = next(spec for spec in ten if spec.method == "fedlesam" and spec.split == "dirichlet-0.1")
    del runs[half]
    averages, gains = tables.make(item, context(runs, tmp_path)).blocks
    assert averages.rows["fedavg"][0].ours == 50 and gains.rows["fedlesam - fedavg"][0].ours == 3
    assert gains.rows["fedlesam - fedavg"][0].paper == 1.68
    assert averages.rows["fedavg"][1].missing == "not run"
    assert "cifar10: the average of 7 of the paper's 8 cells" in tables.make(item, context(runs, tmp_path)).notes


def test_seeds_are_put_together(tmp_path: Path) -> None:
    item = ITEMS["table2"]
    spec = item.specs[0]
    runs = {spec: [run("fedavg", [70.0, 60.0]), run("fedavg", [70.0, 64.0])]}
    blocks = {block.title: block for block in tables.make(item, context(runs, tmp_path)).blocks}
    (part, *_) = SETTINGS
    last, best = (blocks[f"{part}; {name}"].rows["fedavg"][0] for name in ("last round", "best round"))
    assert last.ours == pytest.approx(62) and last.spread == pytest.approx(8**0.5)
    assert best.ours == pytest.approx(70) and best.spread == pytest.approx(0)


@pytest.mark.parametrize(
    ("cell", "mark"),
    [
        (Cell(76.3, 0.1, 76.0, 0.18), "="),
        (Cell(76.5, 0.1, 76.0, 0.18), "↑"),
        (Cell(75.0, None, 76.0, 0.18), "↓"),
        (Cell(1.0, None, 1.0), "="),
        (Cell("yes", None, "no"), "≠"),
        (Cell(None, None, 76.0, missing="away"), ""),
    ],
)
def test_marks(cell: Cell, mark: str) -> None:
    assert cell.mark == mark


def test_a_sheet_in_every_form(tmp_path: Path) -> None:
    rows = {
        "fedavg": (Cell(70.0, 0.5, 76.0, 0.2), Cell(missing="100 % <away>", paper=1.0)),
        "fed_x": (Cell(71.0, None, 75.0), Cell(2.0)),
    }
    table = ResultTable("table0", "a & b", (Block("upper", ("one", "two|three"), rows, ranked=True),), ("note 1",))
    text = markdown(table)
    assert "| fedavg | 70.00 ± 0.50 / 76.00 (↓ -6.00) | — / 1.00 |" in text
    assert "| Kendall's tau | -1.00 | — |" in text and "two\\|three" in text
    assert "- missing, 1 cell: 100 % <away>" in text and "- note 1" in text
    tex = latex(table)
    assert r"fed\_x" in tex and r"a \& b" in tex and tex.count(r"\begin{table}") == 1
    lines = list(csv.reader(table_csv(table).splitlines()))
    assert lines[1][:6] == ["table0", "upper", "fedavg", "one", "70.0", "0.5"] and lines[1][8:10] == ["-6.0", "↓"]
    assert len({len(line) for line in lines}) == 1 and len(lines) == 5
    shown = page("t", [table], ["reduction: fewer", "choice: ours"], {"a & b": tmp_path / "report-1.html"})
    assert '<td class="missing" title="100 % &lt;away&gt;">—<small>1.00</small></td>' in shown
    assert "<td>70.00 ± 0.50<small>76.00 (↓ -6.00)</small></td>" in shown and "<details" in shown
    assert "<strong>Reduced against the paper</strong><ul><li>fewer</li></ul>" in shown
    assert '<a href="report-1.html">a &amp; b</a>' in shown and "<h3>upper</h3>" in shown
    folded = dataclasses.replace(table, blocks=(dataclasses.replace(table.blocks[0], folded=True),))
    assert "<summary>upper</summary>" in page("t", [folded])


def test_terms_are_those_of_the_tables_asked_for() -> None:
    """The terms of CIFAR's tables say nothing about PACS, and the other way round."""
    scale = SCALES["cpu"]
    assert scale.domains is not None
    said = {name: "\n".join(Request([ITEMS[name]], scale).terms()) for name in ("table2", "table3", "table4", "table7")}
    for name, cifar, domains in (
        ("table2", True, False),
        ("table3", False, True),
        ("table4", True, True),
        ("table7", True, False),
    ):
        assert all((sentence in said[name]) == cifar for sentence in scale.reductions), name
        assert all((text in said[name]) == domains for text in (*scale.domains.reductions, *DOMAIN_CHOICES)), name
        assert all(sentence in said[name] for sentence in CHOICES), name

"""fedlesam report, and the report at the end of a comparison."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import fedlesam

from fedlesam.cli import main

TINY = ["--clients", "6", "--active", "2", "--epochs", "1", "--batch-size", "50", "--model", "mlp:hidden=4"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, of two methods and two seeds, with what it printed beside it."""
    folder = tmp_path_factory.mktemp("comparison")
    command = ["compare", "fedavg", "fedlesam", *TINY, "--rounds", "3", "--seeds", "2", "--out", "c"]
    code, _, err = fedlesam(folder, *command).wait()
    assert code == 0, err
    return folder


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["fedlesam", "report", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_compare_ends_with_a_report(comparison: Path) -> None:
    last = (comparison / "out").read_text().splitlines()[-1]
    assert last == "report: c/report.html"
    text = (comparison / "c" / "report.html").read_text(encoding="utf-8")
    assert "<title>2 methods on digits</title>" in text
    assert "Before you compare" not in text, "a comparison is comparable"


def test_one_run_many_and_a_folder_of_them(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for runs, methods in (
        (["c/fedavg-seed0"], [{"method": "fedavg", "seeds": [0]}]),
        (
            ["c/fedavg-seed0", "c/fedlesam-seed1"],
            [{"method": "fedavg", "seeds": [0]}, {"method": "fedlesam", "seeds": [1]}],
        ),
        (["c"], [{"method": "fedavg", "seeds": [0, 1]}, {"method": "fedlesam", "seeds": [0, 1]}]),
    ):
        assert call(monkeypatch, comparison, *runs, "--out", "new/r.html", "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["report"], said["methods"]) == ("new/r.html", methods)
        assert (comparison / "new" / "r.html").stat().st_size < 8_000_000


def test_report_and_runs_find_the_same_runs(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However deep they are."""
    deep = tmp_path / "a" / "b" / "run"
    deep.mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "summary.json"):
        (deep / name).write_bytes((comparison / "c" / "fedlesam-seed0" / name).read_bytes())
    assert call(monkeypatch, tmp_path, "a", "--json") == 0
    assert [one["method"] for one in json.loads(capsys.readouterr().out)["methods"]] == ["fedlesam"]
    monkeypatch.setattr(sys, "argv", ["fedlesam", "runs", "a", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert [run["algorithm"] for run in json.loads(capsys.readouterr().out)] == ["fedlesam"]


def test_figures_tables_and_targets(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["--target", "1%", "--target", "0.999", "--figures", "f", "--tables", "t"]
    assert call(monkeypatch, comparison, "c", "--out", "r.html", *wanted) == 0
    assert capsys.readouterr().out.splitlines() == ["figures: f", "tables: t", "report: r.html"]
    table = (comparison / "t" / "to-target.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table] == ["target", "1 %", "1 %", "99.9 %", "99.9 %"]
    assert "by all 2 seeds" in table[1]
    assert "never (best" in table[3]
    assert {"test_accuracy.png", "test_accuracy.pdf", "split.pdf"} <= {
        path.name for path in (comparison / "f").iterdir()
    }


def test_the_same_runs_make_the_same_page(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        assert call(monkeypatch, comparison, "c", "--out", f"{name}.html", "--figures", name, "-q") == 0
    assert (comparison / "a.html").read_bytes() == (comparison / "b.html").read_bytes()
    for path in (comparison / "a").iterdir():
        assert path.read_bytes() == (comparison / "b" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["empty"], "is not a run folder, and holds none"),
        (["c", "--target", "eighty"], "expected an accuracy such as 0.8 or 80%, got 'eighty'"),
        (["c", "--target", "0"], "an accuracy is above 0 and at most 100%, got '0'"),
        (["c", "--target", "120%"], "got '120%'"),
        (["c", "--target", "nan"], "got 'nan'"),
        (["c", "c/fedavg-seed0/config.toml"], "there is no such folder"),
    ],
)
def test_bad_input(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    (comparison / "empty").mkdir(exist_ok=True)
    assert call(monkeypatch, comparison, *args, "--out", "bad.html") == 2
    assert said in capsys.readouterr().err
    assert not (comparison / "bad.html").exists()


def test_incompatible_runs_are_refused(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    text = (comparison / "c" / "fedavg-seed0" / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace("mlp:hidden=4", "mlp:hidden=8"))
    assert call(monkeypatch, comparison, "c", str(other), "--out", "bad.html") == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: these runs cannot be compared, model is mlp:hidden=4 in c/fedavg-seed0, mlp:hidden=8 in "
    )
    assert not (comparison / "bad.html").exists()


def test_reading_a_report_needs_no_torch(comparison: Path) -> None:
    """It is quick, also where PyTorch takes seconds to import."""
    code = (
        "import sys\nfrom fedlesam.cli import cli\n"
        "cli(['report', 'c', '-q'], standalone_mode=False)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=comparison, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")

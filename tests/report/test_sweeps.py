"""What a sweep shows, per-client results, the curves as a file and the order of methods: all without a browser."""

import csv
import io
import itertools
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from fake_runs import fake_run, fake_sweep

from fedlesam.report.charts import charts_of
from fedlesam.report.groups import compare_runs
from fedlesam.report.page import page
from fedlesam.report.story import MEASURED, story
from fedlesam.report.style import COLOURS, MARKERS, OWN, looks
from fedlesam.report.summaries import tables_of
from fedlesam.report.sweeps import views
from fedlesam.report.write import curves_csv, write_report
from fedlesam.runs import order
from fedlesam.runs.read import Run, find_runs


def rewritten(folder: Path, change: Any) -> Path:
    """A run whose records were changed."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**record, **change(record)}) + "\n" for record in records))
    return folder


def test_a_sweep_is_seen_by_the_number_of_its_settings(tmp_path: Path) -> None:
    runs = find_runs([fake_sweep(tmp_path)])
    one, two, three = views(compare_runs(runs))
    assert (one.form, one.settings, list(one.points), list(one.beside)) == ("lines", ("rho",), ["fedsam"], ["fedavg"])
    assert [point.values for point in one.points["fedsam"]] == [(0.01,), (0.1,), (1.0,)]
    assert one.is_log(0)
    for point in one.points["fedsam"]:
        ends = [
            r.scores["mean_of_last"] for r in runs if r.method == "fedsam" and r.config.hyper["rho"] == point.values[0]
        ]
        assert point.score.mean == pytest.approx(sum(ends) / 2)
        assert point.score.spread == pytest.approx(abs(ends[0] - ends[1]) / 2**0.5)
    assert (two.form, set(two.settings), len(two.points["fedlesam"])) == ("grid", {"rho", "lr"}, 6)
    assert (three.form, set(three.settings), len(three.points["fedsmoo"])) == ("parallel", {"rho", "lr", "lam"}, 12)
    assert three.axis(three.settings.index("rho")) == [0.01, 0.1, 1.0]
    comparison = compare_runs(runs)
    assert '"form":"parallel"' in page(comparison, charts_of(comparison), [])


def test_methods_that_were_not_swept_have_no_such_view(tmp_path: Path) -> None:
    runs = find_runs([fake_run(tmp_path / name, name) for name in ("fedavg", "fedsam")])
    assert views(compare_runs(runs)) == []


def test_results_of_clients_and_metrics_of_ones_own(tmp_path: Path) -> None:
    def more(record: dict[str, Any]) -> dict[str, Any]:
        value = record["test_accuracy"]
        own = {"mean": value, "worst_tenth": value / 2, "spread": 0.1}
        return {"per_client": own, "test_clients": {"f1": own}, "metrics": {"accuracy": value, "f1": value**2}}

    folders = [rewritten(fake_run(tmp_path / str(seed), seed=seed), more) for seed in (0, 1)]
    runs = find_runs(folders)
    comparison = compare_runs(runs)
    tables = {table.key: table for table in tables_of(comparison, [])}
    ends = [run.curve("test_accuracy")[1][-1] for run in runs]
    mixture = next(row for row in tables["clients"].rows if "mixture" in str(row[0]))
    assert mixture[2] == pytest.approx(100 * sum(ends) / 4), "the worst tenth, in percent"
    own = next(row for row in tables["clients"].rows if "F1 of clients" in str(row[0]))
    assert own[2] == pytest.approx(sum(ends) / 4)
    assert tables["metrics"].rows[0][1] == pytest.approx(sum(end**2 for end in ends) / 2)
    charts = {chart.key: chart for chart in charts_of(comparison)}
    assert charts["clients-f1-worst_tenth"].series[0].mean[-1] == pytest.approx(sum(ends) / 4)
    assert charts["clients-mixture-mean"].series[0].costs["MB sent"][-1] == pytest.approx(24)
    assert charts["f1"].series[0].mean[-1] == pytest.approx(sum(end**2 for end in ends) / 2)


def test_curves_as_a_file(tmp_path: Path) -> None:
    folders = [fake_run(tmp_path / str(seed), seed=seed, probes=True) for seed in range(3)]
    write_report(find_runs(folders), tmp_path / "r.html", tables=tmp_path / "t")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t" / "curves.csv").read_text())))
    last = next(row for row in rows if row["curve"] == "test_accuracy" and row["round"] == "12")
    ends = [100 * run.curve("test_accuracy")[1][-1] for run in find_runs(folders)]
    assert float(last["mean"]) == pytest.approx(sum(ends) / 3)
    assert (float(last["low"]), float(last["high"])) == (min(ends), max(ends))
    spent = {name: float(last[name]) for name in ("backward passes", "MB sent", "seconds of training")}
    assert spent == {"backward passes": 1200, "MB sent": 24, "seconds of training": 6}
    sharp = [row for row in rows if row["curve"] == "sharpness-ascent"]
    assert [float(row["MB sent"]) for row in sharp] == [2.0 * int(row["round"]) for row in sharp], (
        "probes have costs, too"
    )
    comparison = compare_runs(find_runs(folders))
    assert curves_csv(comparison, charts_of(comparison)) == (tmp_path / "t" / "curves.csv").read_text()


def test_methods_stay_in_the_order_in_which_they_were_named(tmp_path: Path) -> None:
    for name in ("fedavg", "scaffold", "fedlesam"):
        fake_run(tmp_path / name, name)
    order.keep(tmp_path, ["scaffold", "fedlesam"])
    assert [run.method for run in find_runs([tmp_path])] == ["scaffold", "fedlesam", "fedavg"]
    order.keep(tmp_path, ["fedavg"])
    assert [run.method for run in find_runs([tmp_path])] == ["fedavg", "scaffold", "fedlesam"], "the newest first"
    (tmp_path / order.FILE).write_text("{")
    assert [run.method for run in find_runs([tmp_path])] == ["fedavg", "fedlesam", "scaffold"], "by name"


def test_up_to_twelve_methods_have_colours_of_their_own() -> None:
    arms = [
        "fedavg",
        "fedlesam",
        "fedlesam-ahead",
        "random-round",
        "random-step",
        "fedsam",
        "freesam",
        "fedlesam-released",
    ]
    assert {colour for colour, _ in looks(arms)} == set(OWN)
    known = dict(zip(arms, looks(arms), strict=True))
    assert known["fedsam"] == looks(["fedsam"])[0], "the paper's methods keep theirs"
    twelve = [*arms, "fedprox", "freesam-d", "fedadam", "fedcm"]
    assert len({colour for colour, _ in looks(twelve)}) == len(twelve) == len(COLOURS)
    many = looks([*twelve, "freesam-s", "mofedsam", "fedlesam-m", "fedlesam-d", "random-round-s", "random-step-s"])
    assert all(one[0] != other[0] for one, other in itertools.pairwise(many)), "neighbours differ"
    assert len({(colour, MARKERS[line]) for colour, line in many}) == len(many), "as lines and as points"


def demo(folder: Path, gap: float = 0.0, rises: dict[str, list[float]] | None = None) -> list[Run]:
    """Runs as the demo's, of three seeds, with these rises of the loss."""
    ends = {"fedavg": 0.8, "fedsam": 0.75, "scaffold": 0.9, "fedlesam": 0.8 - gap, "fedlesam-s": 0.899}
    for (name, end), seed in itertools.product(ends.items(), range(3)):
        hyper = {"rho": 0.1} if "sam" in name else {}
        run = fake_run(folder / f"{name}-{seed}", name, seed=seed, hyper=hyper, probes=True)
        rewritten(run, lambda record, end=end: {"test_accuracy": end})
        summary = json.loads((run / "summary.json").read_text())
        summary["accuracy"] = dict.fromkeys(("last", "mean_of_last", "best"), end)
        (run / "summary.json").write_text(json.dumps(summary))
        if rises is not None and name in rises:
            line = {"round": 12, "probe": "sharpness", "values": {"ascent": rises[name][seed]}}
            (run / "probes.jsonl").write_text(json.dumps({**line, "metadata": {"radius": 0.1}, "seconds": 0.1}) + "\n")
    return find_runs([folder])


@pytest.mark.parametrize(
    ("sam", "said"),
    [
        (
            [0.04, 0.05, 0.06],
            "and flatter: within a radius of 0.1 its training loss rises by 0.050, fedavg's by 0.100 ",
        ),
        (
            [0.14, 0.15, 0.16],
            "and sharper: within a radius of 0.1 its training loss rises by 0.150, fedavg's by 0.100 ",
        ),
        ([0.02, 0.05, 0.14], "fedavg's by 0.100: its mean is lower, but the seeds do not tell whether it is flatter "),
        ([0.06, 0.15, 0.18], "fedavg's by 0.100: its mean is higher, but the seeds do not tell whether it is flatter "),
    ],
)
def test_the_story_calls_flatter_what_the_seeds_tell(tmp_path: Path, sam: list[float], said: str) -> None:
    first, _ = story(demo(tmp_path, rises={"fedavg": [0.1] * 3, "fedsam": sam}))
    half = 4.302653 * stdev(sam) / 3**0.5
    low, high = fmean(sam) - 0.1 - half, fmean(sam) - 0.1 + half
    assert first.endswith(f"{said}(95 % interval of the difference, over 3 seeds: {low:+.3f} to {high:+.3f}).")


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (0.001, "fedlesam ties with fedavg (-0.1 points)"),
        (0.0004, "fedlesam ties with fedavg (0.0 points)"),
        (-0.0004, "fedlesam ties with fedavg (0.0 points)"),
        (0.2, "fedlesam is 20.0 points below fedavg"),
    ],
)
def test_the_story_follows_the_numbers(tmp_path: Path, gap: float, said: str) -> None:
    first, second = story(demo(tmp_path, gap))
    assert first.startswith("scaffold ends highest, 90.0 % to fedavg's 80.0 %; fedsam is 5.0 points below fedavg")
    assert second.startswith(said)
    assert "fedlesam-s ties with scaffold (-0.1 points)" in second
    assert "rho = 0.1" in second
    assert "an explanation, which this demo does not test" in second
    assert "because" not in second, "the demo measures no cause"
    measured = Path(__file__).parents[2] / MEASURED.partition("/tree/main/")[2] / "README.md"
    assert "\n## Where the perturbations point\n" in measured.read_text("utf-8")

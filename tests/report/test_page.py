"""The page without a browser: what is in the file."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from fake_runs import fake_run
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.cli.options import build_config
from fedlesam.report.charts import charts_of
from fedlesam.report.commands import command
from fedlesam.report.groups import compare_runs
from fedlesam.report.page import Pool, compact, inline_json, page
from fedlesam.report.summaries import tables_of
from fedlesam.report.write import write_report
from fedlesam.runs import config as configs
from fedlesam.runs.read import find_runs, read_run


class Elements(HTMLParser):
    """All tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words, self.scripts = "", [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.words += data

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[1])
        return found


def made(*folders: Path) -> Elements:
    comparison = compare_runs(find_runs(folders))
    return Elements(page(comparison, charts_of(comparison), tables_of(comparison, [0.3])))


def test_a_page_is_well_formed_and_whole(tmp_path: Path) -> None:
    found = made(*(fake_run(tmp_path / name, name, probes=True) for name in ("fedavg", "fedlesam")))
    assert found.open == [], "every tag is closed"
    assert not [tag for tag, attributes in found.tags if "src" in attributes], "nothing is loaded"
    links = [str(a["href"]) for _, a in found.tags if "href" in a]
    assert all(link.startswith(("data:", "#")) for link in links)
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for said in ("2 methods on digits", "0.1.0", "fedlesam run --algorithm fedlesam", "x86_64, 2 cores", str(tmp_path)):
        assert said in found.words, said
    assert [panel["kind"] for panel in found.data["panels"]].count("surfaces") == 1


def test_a_page_works_without_probes_splits_and_versions(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "x")
    for name in ("versions.json", "split.safetensors", "summary.json"):
        (folder / name).unlink()
    found = made(folder)
    assert {panel["kind"] for panel in found.data["panels"]} == {"curves"}
    (folder / "metrics.jsonl").unlink()
    assert made(folder).data["panels"] == [], "a run that has just begun"


def test_names_cannot_break_out(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    found = made(
        fake_run(tmp_path / "a", evil, probes=True, split=evil), fake_run(tmp_path / "b", "fedavg", probes=True)
    )
    assert len(found.scripts) == 4, "the data, plotly and the page's own"
    assert found.open == []
    assert evil in found.words
    assert found.data["groups"][0]["label"].startswith(evil)


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_inline_json_is_the_same_content_and_no_markup(content: Any) -> None:
    text = inline_json(content)
    assert json.loads(text) == content
    assert not set(text) & set("<>&")


def test_plotly_can_stand_in_a_script() -> None:
    text = files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
    own = files("fedlesam.report").joinpath("templates", "page.js").read_text("utf-8")
    assert not re.search(r"</script|<!--\s*<script", text + own, re.IGNORECASE)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_numbers_keep_five_digits(value: float) -> None:
    short = compact(value)
    if value != value or abs(value) > 1.7976e308:
        assert short is None, "JSON has no such number"
    else:
        assert short == pytest.approx(value, rel=1e-4, abs=1e-300)
        assert json.loads(json.dumps(short)) == short


def test_equal_arrays_are_kept_once() -> None:
    pool = Pool()
    places = [pool.put(values) for values in ([1.0, 2.0], [1.0, 3.0], [1.0, 2.0], None)]
    assert places == [0, 1, 0, None]
    assert pool.arrays == [[1, 2], [1, 3]]


def test_charts_hold_the_mean_and_the_range_of_the_seeds(tmp_path: Path) -> None:
    folders = [fake_run(tmp_path / str(seed), seed=seed, rounds=4) for seed in range(3)]
    [accuracy] = [c for c in charts_of(compare_runs(find_runs(folders))) if c.key == "test_accuracy"]
    [series] = accuracy.series
    curves = [[100 * value for value in read_run(folder).curve("test_accuracy")[1]] for folder in folders]
    for i, at in enumerate(zip(*curves, strict=True)):
        assert series.x[i] == i + 1
        assert series.mean[i] == pytest.approx(sum(at) / 3)
        assert series.low is not None
        assert series.high is not None
        assert (series.low[i], series.high[i]) == (min(at), max(at))
    assert series.costs["MB sent"] == pytest.approx([2, 4, 6, 8])
    assert series.costs["seconds of training"] == pytest.approx([0.5, 1, 1.5, 2])


def test_a_curve_evaluated_now_and_then_keeps_its_costs(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "x", rounds=9, evaluate_every=4)
    [accuracy] = [c for c in charts_of(compare_runs(find_runs([folder]))) if c.key == "test_accuracy"]
    assert accuracy.series[0].x == [4, 8]
    assert accuracy.series[0].costs["MB sent"] == pytest.approx([8, 16])


def test_the_telling_number_of_a_probe_comes_first_and_clients_do_not_flood(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "x")
    values = {
        "loss": 1.0,
        "ascent": 2.0,
        **{f"local_{i}": 0.1 for i in range(13)},
        **{f"eigenvalue_{i}": 1.0 for i in (1, 2)},
    }
    line = {"round": 3, "probe": "sharpness", "values": values, "about": {"radius": 0.05}}
    (folder / "probes.jsonl").write_text(json.dumps(line) + "\n")
    found = [c for c in charts_of(compare_runs(find_runs([folder]))) if c.section == "sharpness"]
    assert [chart.y_label for chart in found] == ["ascent", "loss", "eigenvalue 1", "eigenvalue 2"]
    assert found[0].caption == "Measured with radius 0.05."


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "my rules:x y", "hyper": {"rho": 0.05, "kappa": "a b", "lr_g": 1.0}},
        {"augment": False, "per_client": True, "active": 3, "epochs": "1-5", "data_dir": "some where", "clip": 0.0},
        {"split": "file:it's", "momentum": 0.9, "lr": 1e-05, "threads": 4, "workers": 3, "evaluate_every": 7},
    ],
)
def test_commands_make_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    import shlex

    import click

    from fedlesam.cli.run_command import command as run_command

    config = read_run(fake_run(tmp_path / "x", **settings)).config
    words = shlex.split(command(config))
    assert words[:2] == ["fedlesam", "run"]
    given = run_command.make_context("run", words[2:], resilient_parsing=False).params
    flags = {k: v for k, v in given.items() if k in configs.OPTIONS or k in configs.HYPER}
    again = build_config(None, given["assignments"], flags)
    assert configs.differences(config, again) == []
    assert again.data_dir == config.data_dir
    assert isinstance(run_command, click.Command)


def test_figures_and_tables_as_files(tmp_path: Path) -> None:
    from PIL import Image

    names = ["fedavg", "fedlesam", "a $name_"]
    folders = [fake_run(tmp_path / f"{i}-{s}", n, seed=s, probes=True) for i, n in enumerate(names) for s in (0, 1)]
    heard: list[tuple[int, int]] = []
    figures, tables = tmp_path / "f", tmp_path / "t"
    write_report(
        find_runs(folders),
        tmp_path / "new" / "r.html",
        figures=figures,
        tables=tables,
        targets=[0.2],
        done=lambda done, of: heard.append((done, of)),
    )
    charts = charts_of(compare_runs(find_runs(folders)))
    expected = {chart.key for chart in charts} | {"split", "surface-2d-heights", "surface-2d-contours"}
    assert {path.stem for path in figures.iterdir()} == expected
    drawn = len(expected) - 2  # the three of surfaces are one piece of work
    assert heard == [(i, drawn) for i in range(drawn + 1)]
    for name in expected:
        with Image.open(figures / f"{name}.png") as image:
            assert image.width > 900
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert {path.name for path in tables.iterdir()} == {"curves.csv"} | {
        f"{name}.{ending}"
        for name in ("results", "gains", "metrics", "costs", "to-target", "differences")
        for ending in ("csv", "md", "tex")
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.html"], "and no part of a file"


def test_twenty_runs_of_eight_hundred_rounds_stay_small(tmp_path: Path) -> None:
    for i in range(20):
        fake_run(tmp_path / "runs" / str(i), "fedlesam", rounds=800, hyper={"rho": 0.01 * (i + 1)})
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 8_000_000


def test_the_privacy_that_was_spent_is_a_chart(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "a", "fedsam", rounds=3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spent = [json.dumps({**line, "epsilon": 0.5 * (i + 1)}) for i, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("\n".join(spent) + "\n")
    [chart] = [chart for chart in charts_of(compare_runs(find_runs([folder]))) if chart.key == "epsilon"]
    assert chart.series[0].mean == [0.5, 1.0, 1.5]

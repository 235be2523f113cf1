"""The claims on a network from scratch: what is run, and when the smaller clients are."""

import dataclasses
import json
from pathlib import Path

import pytest

from reproduction import heads, heads_tables, scratch, scratch_run
from reproduction.heads import Lines, Trial
from reproduction.scratch import ScratchBench
from reproduction.writing import markdown


def filled(path: Path, bench: ScratchBench, gain: dict[str, float]) -> Lines:
    while left := heads.pending(bench, path):
        with path.open("a") as file:
            for trial in left:
                noise = 0.0 if trial.tuning else 0.1 * ((31 * len(trial.arm) + 17 * trial.seed) % 7)
                about = {name: getattr(bench, name) for name in ("rounds", "images", "clients")} | {"of": bench.data}
                values = [60 + gain.get(trial.arm, 0) + noise] * 5
                file.write(json.dumps({**dataclasses.asdict(trial), **about, "evaluations": values}) + "\n")
    return Lines.read(bench, path)


def test_every_data_set_has_its_own_lines_names_and_printed_gains() -> None:
    every = scratch.benches("cpu")
    assert len({bench.name for bench in every}) == 6 == len({(bench.data, bench.images) for bench in every})
    gains = {bench.data: bench.printed("fedlesam-s", "scaffold") for bench in every}
    assert gains == {"fashion-mnist": 6.16, "cifar10": 6.16, "cifar100": 3.34}
    assert every[0].cell != every[2].cell == "this cell"


def test_the_family_is_judged_by_the_rule_of_the_features(tmp_path: Path) -> None:
    bench = scratch.benches("cpu")[0]
    lines = filled(tmp_path / "runs.jsonl", bench, {"fedgamma": 2, "fedlesam-s": -1})
    assert {trial.arm for trial in lines.found} == {"scaffold", "fedgamma", "fedlesam-s", "freesam-s"}
    rows = heads_tables.make(bench, lines).blocks[1].rows
    assert {name: cells[-1].ours for name, cells in rows.items()} == {
        "fedlesam-s over scaffold": "against",
        "fedlesam-s over fedgamma": "against",
    }
    assert len(lines.found) <= heads.count([bench])[0] == 60


@pytest.mark.parametrize(("gain", "due"), [(0.5, True), (1.5, False)])
def test_smaller_clients_are_due_where_the_gate_failed(tmp_path: Path, gain: float, due: bool) -> None:
    first, second, *_ = scratch.benches("cpu")
    path = tmp_path / "runs.jsonl"
    assert scratch.is_due(first, path) and not scratch.is_due(second, path), "nothing is known yet"
    filled(path, first, {"fedgamma": gain})
    assert scratch.is_due(second, path) == due


def test_runs_see_pictures_and_are_lines(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert call("claim-scratch", "--scale", "smoke", "--out", str(tmp_path / "runs"), "-q") == 0
    runs = [json.loads(text) for text in (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == 12 and all("claim-scratch --only data=fashion-mnist" in run["command"] for run in runs)
    table = next((tmp_path / "runs").glob("*.md")).read_text()
    again = ("--lines", str(tmp_path / "runs" / "runs.jsonl"), "--out", str(tmp_path / "again"), "-q")
    assert call("claim-scratch", "--scale", "smoke", *again) == 0
    assert next((tmp_path / "again").glob("*.md")).read_text() == table


def test_the_network_has_group_norm_and_trains_client_by_client() -> None:
    bench = scratch.benches("smoke")[0]
    runner = scratch_run.ScratchRunner(bench, scratch_run.load(None, smoke=True))
    federation = runner.federation(Trial("pathological-3", True, "scaffold", None, 0.1, 1000))
    assert federation.execution.engine == "plain" and bench.model.startswith("cnn")
    assert any("GroupNorm" in type(part).__name__ for part in federation.replica().module.modules())


def test_the_committed_tables_follow_from_the_committed_lines() -> None:
    committed = Path(__file__).parents[2] / "docs" / "results" / "scratch"
    for bench in scratch.benches("cpu"):
        lines, page = Lines.read(bench, committed / "runs.jsonl"), committed / f"{bench.name}.md"
        assert page.exists() == bool(lines.found), bench.name
        if lines.found:
            assert page.read_text("utf-8") == markdown(heads_tables.make(bench, lines, scratch.NAME, scratch.SHOWS)), (
                bench.name
            )

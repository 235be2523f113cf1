"""The claims on left-out domains: what trains, what is held out and tested, order of work, verdicts from lines."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from reproduction import domains, domains_run, domains_tables, heads_tables
from reproduction.domains import DomainBench
from reproduction.heads import Lines, Trial

SMOKE = domains.federations("smoke")[0]


def filled(path: Path, benches: list[DomainBench], gain: dict[str, float]) -> list[Lines]:
    """Every run: an arm has 60 plus its gain, at rho / lr 3 one point more; photo is worse by 20; seeds differ."""
    while left := domains.pending(benches, path):
        with path.open("a") as file:
            for trial in left:
                best = trial.rho is not None and trial.rho == pytest.approx(3 * trial.lr)
                noise = 0.1 * (((31 * len(trial.arm) + 17 * trial.seed) % 7) - 3) if not trial.tuning else 0.0
                value = 60 - 20 * (trial.split == "photo") + gain.get(trial.arm, 0) + best + noise + trial.lr
                about = {"rounds": benches[0].rounds, "images": 9991, "clients": benches[0].clients, "of": "pacs"}
                file.write(json.dumps({**dataclasses.asdict(trial), **about, "evaluations": [value] * 5}) + "\n")
    return [Lines.read(bench, path) for bench in benches]


def verdicts(benches: list[DomainBench], lines: list[Lines]) -> dict[str, object]:
    block = domains_tables.make(benches, lines).blocks[0]
    return {name: cells[-1].ours for name, cells in block.rows.items()}


def test_differences_are_averaged_over_targets_and_judged(tmp_path: Path) -> None:
    benches = domains.federations("cpu")[0]
    lines = filled(tmp_path / "runs.jsonl", benches, {"fedgamma": 2, "fedlesam": 3, "fedlesam-s": -2})
    assert lines[0].lr("fedlesam") == 0.1 and lines[0].rho("fedlesam") == pytest.approx(0.3)
    assert verdicts(benches, lines) == {
        "fedlesam over fedavg": "for",
        "fedlesam-s over scaffold": "against",
        "fedlesam-d over feddyn": "for",
        "fedlesam over fedsam": "not testable here",
        "fedlesam-s over fedgamma": "against",
    }
    average = domains_tables.Averaged(lines).tests("scaffold")
    assert average[0] == pytest.approx(np.mean([some.tests("scaffold")[0] for some in lines]))
    assert max(average.values()) < 56, "photo's 20 points less are in the mean"


def test_nothing_speaks_against_it_where_sam_does_not_help(tmp_path: Path) -> None:
    benches = domains.federations("cpu")[0]
    some = {"fedgamma": -3, "fedsam": -3, "fedlesam-s": -2}
    said = verdicts(benches, filled(tmp_path / "runs.jsonl", benches, some))
    assert said["fedlesam-s over scaffold"] == heads_tables.NO_CONTROL


def test_a_family_is_finished_on_all_targets_before_the_next(tmp_path: Path) -> None:
    path, benches = tmp_path / "runs.jsonl", domains.federations("cpu")[0]
    filled(path, benches, {})
    order = [json.loads(text) for text in path.read_text().splitlines()]
    results = [(run["arm"], run["split"]) for run in order if not run["tuning"]]
    first = results[: 3 * 4 * 10]
    assert {arm for arm, _ in first} == {"scaffold", "fedlesam-s", "fedgamma"}
    assert {target for _, target in first} == set(domains.TARGETS)
    at_papers = [run for run in order if not run["tuning"] and run["rho"] == pytest.approx(10 * run["lr"])]
    assert {run["arm"] for run in at_papers} == set(benches[0].at_papers) and len(order) <= 912


def places(runner: domains_run.DomainRunner, x: torch.Tensor, target: str) -> set[int]:
    """Of samples among all; they are all different."""
    known = {tuple(row.flatten().tolist()): i for i, row in enumerate(runner.projected[target].train.x)}
    return {known[tuple(row.flatten().tolist())] for row in x}


def test_the_target_is_the_test_and_held_out_images_are_of_the_sources() -> None:
    data = domains_run.load(None, smoke=True)
    distinct = torch.randn(data.train.x.shape, generator=torch.Generator().manual_seed(0))
    data = dataclasses.replace(data, train=dataclasses.replace(data.train, x=distinct))
    runner = domains_run.DomainRunner(dataclasses.replace(SMOKE[0], clients=2), data)
    trial = Trial("photo", True, "fedavg", None, 0.1, 1000)
    target = set(np.flatnonzero(runner.whole.domains.of == 2).tolist())  # type: ignore[union-attr]
    tuned = runner.problem(trial)
    trained = [set(part.tolist()) for part in tuned.clients]
    held = places(runner, tuned.data.test.x, "photo")
    assert len(trained) == 6 and sum(map(len, trained)) == len(set.union(*trained))
    assert not set.union(*trained) & held and set.union(*trained) | held | target == set(range(1437))
    assert not held & target and len(held) == pytest.approx(0.1 * (1437 - len(target)), abs=15)
    result = runner.problem(dataclasses.replace(trial, tuning=False, seed=0))
    assert places(runner, result.data.test.x, "photo") == target
    assert not set.union(*(set(part.tolist()) for part in result.clients)) & target
    again = runner.problem(dataclasses.replace(trial, seed=1001))
    assert places(runner, again.data.test.x, "photo") != held, "every seed draws its own"


def test_the_target_is_not_seen_by_the_components() -> None:
    data = domains_run.load(None, smoke=True)
    sources = data.domains.of != 1  # type: ignore[union-attr]
    other = dataclasses.replace(data.train, x=data.train.x + torch.from_numpy(~sources)[:, None, None, None] * 7.0)
    first, second = (
        domains_run.project(dataclasses.replace(data, train=train), sources).train.x for train in (data.train, other)
    )
    where = torch.from_numpy(sources)
    assert torch.equal(first[where], second[where]) and not torch.equal(first[~where], second[~where])
    assert first[where].std((0, 1, 2)).square().mean() == pytest.approx(1, abs=1e-4)


def test_printed_gains_are_those_of_the_part_that_is_not_a_copy() -> None:
    bench = domains.federations("cpu")[0][0]
    assert bench.printed("fedlesam", "fedavg") == pytest.approx(1.39)
    assert bench.printed("fedlesam-s", "scaffold") == pytest.approx(1.53)


def test_the_command_trains_lines_and_makes_tables_from_them(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert call("claim-domains", "--scale", "smoke", "--seeds", "1", "--out", str(tmp_path / "runs"), "-q") == 0
    path = tmp_path / "runs" / "runs.jsonl"
    assert len(path.read_text().splitlines()) == 4 * (9 + 9 + 6)
    again = ("--lines", str(path), "--out", str(tmp_path / "again"), "-q")
    assert call("claim-domains", "--scale", "smoke", "--seeds", "1", *again) == 0
    tables = [tmp_path / folder / "pacs-1-clients.md" for folder in ("runs", "again")]
    assert tables[0].read_text() == tables[1].read_text()
    assert call("claim-domains", "--scale", "smoke", "--only", "splits=photo") == 2


def test_the_committed_tables_follow_from_the_committed_lines() -> None:
    from reproduction.writing import markdown

    committed = Path(__file__).parents[2] / "docs" / "results" / "domains"
    for every in domains.federations("cpu"):
        lines = [Lines.read(bench, committed / "runs.jsonl") for bench in every]
        page = committed / f"pacs-{every[0].clients}-clients.md"
        assert page.exists() == any(some.found for some in lines)
        if page.exists():
            assert page.read_text("utf-8") == markdown(domains_tables.make(every, lines))

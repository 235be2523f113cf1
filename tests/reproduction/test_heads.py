"""The experiment on frozen features: order of work, gate, choice on held-out images, verdicts from lines."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedlesam.runs.stats import PairedDifferences
from reproduction import heads, heads_run, heads_tables
from reproduction.heads import BASES, PRIMARY, Bench, Lines, Trial, stages
from reproduction.significance import p_value
from reproduction.writing import markdown

SMOKE = heads.benches("smoke")[0]


def line(bench: Bench, trial: Trial, accuracy: float) -> str:
    values = {
        **dataclasses.asdict(trial),
        "rounds": bench.rounds,
        "images": bench.images,
        "evaluations": [0.0, *[accuracy] * bench.last],
    }
    return json.dumps(values) + "\n"


def filled(path: Path, bench: Bench, gain: dict[str, float]) -> Lines:
    """Every run of every stage: an arm has 60 plus its gain, at lr .1 and rho .3 one point more; seeds differ."""
    while True:
        lines = Lines.read(bench, path)
        left = [t for stage in stages(bench, lines) for t in stage if t not in lines.found]
        if not left:
            return lines
        with path.open("a") as file:
            for trial in left:
                best = (trial.lr == 0.1) + (trial.rho == 0.3)
                noise = 0.1 * (((31 * len(trial.arm) + 17 * trial.seed) % 7) - 3) if not trial.tuning else 0.0
                file.write(line(bench, trial, 60 + gain.get(trial.arm, 0) + best + noise))


def test_values_are_chosen_on_held_out_images_and_the_family_is_judged(tmp_path: Path) -> None:
    bench = Bench()
    gain = {"fedgamma": 3, "fedsam": 1, "fedlesam": 5, "fedlesam-s": -1, "fedlesam-d": -2}
    lines = filled(tmp_path / "runs.jsonl", bench, gain)
    assert lines.lr("fedlesam") == 0.1 and lines.rho("fedlesam") == 0.3 and lines.gate() == pytest.approx(4)
    judged = heads_tables.judge(bench, lines, heads.CLAIMS)
    found = {
        f"{left} {right}": heads_tables.verdict(favour, p, bench.printed(left, right))
        for (left, right), (favour, p) in judged.items()
    }
    assert found == {
        "fedlesam fedavg": "for",
        "fedlesam-s scaffold": "against",
        "fedlesam-d feddyn": "against",
        "fedlesam fedsam": "for",
        "fedlesam-s fedgamma": "against",
    }
    table = heads_tables.make(bench, lines)
    assert "fedlesam over fedavg" in table.blocks[1].rows and "passed" in str(table.blocks[0].rows)


def test_problems_are_told_apart_and_have_printed_gains(tmp_path: Path) -> None:
    """Each has a name, lines and a cell of the paper of its own."""
    benches = heads.benches("cpu")
    assert len({bench.name for bench in benches}) == len(benches)
    path = tmp_path / "runs.jsonl"
    for place, bench in enumerate(benches):
        trial = Trial(bench.split, True, "scaffold", None, 0.03, 1000)
        whole = json.loads(line(bench, trial, 50 + place)) | {"clients": bench.clients, "of": bench.data}
        with path.open("a") as file:
            file.write(f"{json.dumps(whole)}\n")
    assert [next(iter(Lines.read(bench, path).found.values()))["evaluations"][-1] for bench in benches] == [
        50 + place for place in range(len(benches))
    ]
    gains = {bench.name: bench.printed("fedlesam-s", "scaffold") for bench in benches[2:]}
    assert gains == {
        "pathological-3-15-images": 6.16,
        "dirichlet-0.1-15-images": 0.95,
        "pathological-6-15-images": 2.81,
        "pathological-3-200-clients-15-images": 6.52,
        "cifar100-pathological-10-50-images": 3.34,
        "pathological-3-500-images": 6.16,
    }


def test_a_gate_that_fails_ends_the_work(tmp_path: Path) -> None:
    lines = filled(tmp_path / "runs.jsonl", Bench(), {"fedgamma": -0.5})
    assert {trial.arm for trial in lines.found} == {"scaffold", "fedgamma"}
    assert not any(not trial.tuning for trial in lines.found)


def test_a_gate_that_does_not_stop_lets_nothing_speak_against_a_claim(tmp_path: Path) -> None:
    """The paper's number of images a client: five seeds, two families, p of the t-test."""
    bench = heads.benches("cpu")[-1]
    lines = filled(tmp_path / "runs.jsonl", bench, {"fedgamma": -0.5, "fedlesam": 5, "fedlesam-s": -1.5})
    table = heads_tables.make(bench, lines)
    claims = table.blocks[1].rows
    assert list(claims) == [
        "fedlesam over fedavg",
        "fedlesam-s over scaffold",
        "fedlesam over fedsam",
        "fedlesam-s over fedgamma",
    ]
    assert claims["fedlesam over fedavg"][-1].ours == "for", "the t-test can decide with five seeds"
    assert claims["fedlesam-s over scaffold"][-1].ours == heads_tables.NO_CONTROL
    assert "failed: no claim is against" in str(table.blocks[0].rows)
    assert {trial.arm for trial in lines.found} == {*bench.bases, *bench.tuned} and len(bench.tuned) == 6


def test_all_images_are_trained_on_where_they_are_asked_for() -> None:
    data = heads_run.load(None, smoke=True)
    runner = heads_run.Runner(dataclasses.replace(SMOKE, images=len(data.train)), data)
    trial = Trial("pathological-3", True, "fedavg", None, 0.1, 1000)
    tuned, result = (runner.problem(dataclasses.replace(trial, tuning=some)) for some in (True, False))
    assert len(tuned.data.test) == SMOKE.held_out and len(tuned.data.train) == len(data.train) - SMOKE.held_out
    assert len(result.data.train) == len(data.train) and len(result.data.test) == len(data.test)


def test_the_primary_family_comes_first(tmp_path: Path) -> None:
    bench = Bench()
    filled(tmp_path / "runs.jsonl", bench, {"fedgamma": 3})
    order = [json.loads(text) for text in (tmp_path / "runs.jsonl").read_text().splitlines()]
    results = list(dict.fromkeys(run["arm"] for run in order if not run["tuning"]))
    assert set(results[:8]) == {*BASES, *PRIMARY} and results[:3] == ["scaffold", "fedlesam-s", "fedgamma"]
    assert {run["arm"] for run in order[:16]} == {"scaffold", "fedgamma"}


def test_an_arm_without_all_its_seeds_is_in_no_verdict(tmp_path: Path) -> None:
    bench, path = Bench(), tmp_path / "runs.jsonl"
    filled(path, bench, {"fedgamma": 3})
    kept = [t for t in path.read_text().splitlines() if not ('"fedsam"' in t and '"seed": 9' in t)]
    path.write_text("\n".join(kept) + '\n{"cut off')
    lines = Lines.read(bench, path)
    assert len(lines.tests("fedsam")) == 9
    judged = heads_tables.judge(bench, lines, heads.CLAIMS)
    assert ("fedlesam", "fedsam") not in judged
    favour, corrected = judged["fedlesam-s", "fedgamma"]
    assert corrected == pytest.approx(5 * p_value(favour)), "the family keeps its size"
    assert "1 of 5 wait for runs" in heads_tables.make(bench, lines).blocks[1].title


@pytest.mark.parametrize(
    ("values", "printed", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.2], 3.22, "above 0, but below a quarter of the printed gain"),
        ([1.0, 2.0, 3.0, 2.0], 3.22, "for"),
        ([-1.0, 2.0, 3.0, -2.0], 3.22, "undecided"),
        ([-0.1, -0.2, 0.1, 0.0], 3.22, "against"),
        ([5.0, 5.1, 5.2, 5.1], 0.07, "not testable here"),
    ],
)
def test_the_rule_of_decision(values: list[float], printed: float, expected: str) -> None:
    assert heads_tables.verdict(PairedDifferences(tuple(values)), 0.01, printed) == expected


def test_images_are_drawn_anew_for_every_seed() -> None:
    labels = np.repeat(np.arange(10), 50)
    first, second = (heads_run.draw(labels, 200, seed) for seed in (0, 1))
    assert len(set(first)) == 200 and np.bincount(labels[first]).tolist() == [20] * 10
    assert not np.array_equal(first, second) and np.array_equal(first, heads_run.draw(labels, 200, 0))


def test_runs_are_lines_and_a_second_call_trains_nothing(tmp_path: Path) -> None:
    bench = dataclasses.replace(SMOKE, gate=1000.0)
    runner = heads_run.Runner(bench, heads_run.load(None, smoke=True))
    said: list[str] = []
    path = tmp_path / "runs.jsonl"
    heads_run.work(partial(heads.pending, bench, path), runner.line, path, said.append)
    assert len(said) == 2
    runs = [json.loads(text) for text in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(run["arm"], run["rho"], run["seed"], len(run["evaluations"])) for run in runs] == [
        ("scaffold", None, 1000, 4),
        ("fedgamma", 0.1, 1000, 4),
    ]
    assert runs[0]["mean_of_last"] == pytest.approx(np.mean(runs[0]["evaluations"][-2:]), abs=1e-3)
    heads_run.work(partial(heads.pending, bench, path), runner.line, path, said.append)
    assert len(said) == 2


def test_tuning_never_sees_test_images_nor_trains_on_held_out_ones() -> None:
    runner = heads_run.Runner(SMOKE, heads_run.load(None, smoke=True))
    trial = Trial("pathological-3", True, "fedavg", None, 0.1, 1000)
    tuned = runner.federation(trial)
    pool = {tuple(x.flatten().tolist()) for shard in tuned.clients for x in shard.tensors()[0]}  # type: ignore[union-attr]
    held = runner.whole.train.x
    tested = tuned._local_engine.test
    assert tested is not None and tested.tensors is not None
    judged = {tuple(x.flatten().tolist()) for x in tested.tensors[0]}
    assert not pool & judged and judged <= {tuple(x.flatten().tolist()) for x in held}
    result = runner.federation(dataclasses.replace(trial, tuning=False, seed=0))._local_engine.test
    assert result is not None and result.tensors is not None
    assert len(result.tensors[1]) == len(runner.whole.test) != len(judged)


def test_two_processes_do_not_take_the_same_run(tmp_path: Path) -> None:
    trial = Trial("pathological-3", True, "fedavg", None, 0.1, 1000)
    path = tmp_path / f".{trial.key}.pid"
    with heads_run.claimed(path) as first, heads_run.claimed(path) as second:
        assert first and not second
    path.write_text("999999999")
    with heads_run.claimed(path) as again:
        assert again, "a dead process has nothing"


def test_the_committed_tables_follow_from_the_committed_lines() -> None:
    committed = Path(__file__).parents[2] / "docs" / "results" / "features"
    for bench in heads.benches("cpu"):
        lines = Lines.read(bench, committed / "runs.jsonl")
        page = committed / f"{bench.name}.md"
        assert page.exists() == bool(lines.found), bench.name
        if lines.found:
            assert page.read_text("utf-8") == markdown(heads_tables.make(bench, lines)), bench.name

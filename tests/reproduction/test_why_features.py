"""Why, on the features: predictions that are exact on quadratic losses, and tables from lines."""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fedlesam as fl
from reproduction import heads_run, leaderboard, why_features, why_run, why_tables
from reproduction.heads import HEADS, Trial
from reproduction.why_features import OF_ROUND, OF_STEP, Found

SMOKE = why_features.bench("smoke")
CPU = why_features.bench("cpu")


def quadratic(name: str, epochs: int) -> fl.Federation:
    """Two rounds of a linear model with squared errors, whose Hessian is the same everywhere."""
    rng = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 4, generator=rng), torch.randn(8, 3, generator=rng)) for _ in range(4)]
    torch.manual_seed(0)
    local = fl.LocalTraining(batch_size=8, epochs=epochs, weight_decay=0.0, clip=None, loss=F.mse_loss)
    fed = fl.Federation(torch.nn.Linear(4, 3), clients, fl.algorithms.get(name, rho=0.1), local)
    fed.round()
    return fed


@pytest.mark.parametrize("name", ["fedlesam", "fedsam"])
def test_curvature_predicts_the_change_of_a_quadratic(name: str) -> None:
    """All clients are active, so that FedLESAM's e is the last global step taken back."""
    fed = quadratic(name, epochs=1)
    previous = fed.weights
    fed.round()
    values: why_run.Values = defaultdict(list)
    sums: why_run.Sums = defaultdict(list)
    before = fed.weights
    for client in range(4):
        why_run.per_step(fed, client, previous, values, sums)
        why_run.per_round(fed, client, previous, sums)
    pooled = {
        key: why_tables.share(tuple(map(sum, zip(*some, strict=True)))) for key, some in sums.items() if key != "size"
    }
    assert torch.equal(before, fed.weights), "measuring changes nothing"
    assert pooled[OF_STEP[0]] == pytest.approx((1, 1), abs=1e-3)
    if name == "fedlesam":
        assert all(pooled[key] == pytest.approx((1, 1), abs=1e-3) for key in (OF_STEP[1], *OF_ROUND))
        assert fmean_of(values["e, last global step"]) == pytest.approx(-1, abs=1e-4)
    else:
        assert not set(OF_ROUND) & set(pooled), "e is another one at every step"
        assert pooled[OF_STEP[1]][0] < 0.9 and min(values["rise of the client's loss"]) > 0


def fmean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_line_has_the_accuracy_of_the_same_run_without_measures() -> None:
    data = heads_run.load(None, smoke=True)
    trial = Trial(SMOKE.split, True, "fedlesam", 0.1, 0.03, 1000)
    plain, measured = heads_run.Runner(SMOKE, data).line(trial), why_run.WhyRunner(SMOKE, data).line(trial)
    assert plain["evaluations"] == measured["evaluations"]
    assert set(measured["measures"]) == set(why_features.MEASURES) and set(OF_ROUND) < set(measured["predicted"])
    base = why_run.WhyRunner(SMOKE, data).line(dataclasses.replace(trial, arm="fedavg", rho=None))
    assert base["measures"] == {} == base["predicted"]


def test_which_measure_goes_with_the_gain(tmp_path: Path) -> None:
    """A gain that follows one measure and not another; cells that diverged are left out."""
    path, every = tmp_path / "runs.jsonl", why_features.trials(CPU)
    assert len(every) == len(why_features.pending(CPU, path)) == 2 * (3 + 11 * 5)
    with path.open("w") as file:
        for trial in every:
            place = 0 if trial.rho is None else 10 * why_features.ARMS.index(trial.arm) + CPU.rhos.index(trial.rho)
            diverged = trial.arm == "fedsam" and trial.rho == 1.0
            measures = {} if trial.rho is None else {"e, global gradient": 0.01 * place, "change, e": place % 2}
            if trial.rho is not None:
                measures["e, gradient of the client"] = -0.01 * place
            about = {"rounds": CPU.rounds, "images": CPU.images, "measures": measures, "predicted": {}}
            value = 10.0 if diverged else 50 + 0.01 * place
            file.write(json.dumps({**dataclasses.asdict(trial), **about, "evaluations": [value] * 5}) + "\n")
    found = Found.read(CPU, path)
    assert len(found.cells()) == 55 and not why_features.pending(CPU, path)
    table = why_tables.make(found, leaderboard.make_board("cpu"))
    ranks = table.blocks[1]
    assert ranks.columns[0] == "all, 54 cells" and "1 cells that diverged" in ranks.title
    assert ranks.rows["e, global gradient"][0].ours == pytest.approx(1)
    assert ranks.rows["e, gradient of the client"][0].ours == pytest.approx(-1)
    assert all(trial.lr == (0.1 if (HEADS[trial.arm].base or trial.arm) == "feddyn" else 0.03) for trial in every)


def test_the_leaderboards_sharpness_against_accuracy() -> None:
    board = leaderboard.make_board("cpu")
    for place, method in enumerate(board.methods):
        for seed, entry in enumerate(leaderboard.trials(method)):
            board.found[entry] = {"evaluations": [float(place + 0.01 * seed)] * 5, "sharpness": -place - 0.01 * seed}
    block = why_tables._board(board)
    assert [cell.ours for cell in block.rows["all trials, held-out images"]] == ["186", pytest.approx(-1)]


def test_the_command_makes_lines_and_the_same_table_again(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert call("claim-why-features", "--scale", "smoke", "--out", str(tmp_path / "a"), "-q") == 0
    lines = tmp_path / "a" / "runs.jsonl"
    assert len(lines.read_text().splitlines()) == 3
    assert (
        call("claim-why-features", "--scale", "smoke", "--lines", str(lines), "--out", str(tmp_path / "b"), "-q") == 0
    )
    first, second = (tmp_path / name / "claim-why-features.md" for name in "ab")
    assert first.read_text() == second.read_text() and "step: H e" in first.read_text()


def test_the_committed_table_follows_from_the_committed_lines() -> None:
    from reproduction.lines_studies import LEADERBOARD
    from reproduction.writing import markdown

    committed = Path(__file__).parents[2] / "docs" / "results" / "why"
    found, page = Found.read(CPU, committed / "runs.jsonl"), committed / "claim-why-features.md"
    assert page.exists() == bool(found.lines)
    if found.lines:
        board = leaderboard.make_board("cpu").read(LEADERBOARD)
        assert page.read_text("utf-8") == markdown(why_tables.make(found, board))

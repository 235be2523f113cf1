"""Whether the claim holds: the plan, the choice of rho, the verdicts, and all of it at the smallest scale."""

import csv
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedlesam import algorithms
from fedlesam.engines.stack import Stack
from fedlesam.rules import NoPerturbation
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.read import Run
from reproduction import claim
from reproduction.claim_tables import (
    OURS,
    PAPER,
    Claim,
    at_chosen,
    everywhere,
    judged,
    make,
    over_rho,
    same_rho,
    verdict,
)
from reproduction.findings import Findings, Result
from reproduction.scales import SCALES
from reproduction.studies import ARMS, NAMES, TUNING_SEED, Condition, Where, studies

Call = Callable[..., int | str | None]

CPU, SMOKE = SCALES["cpu"], SCALES["smoke"]


def digits(**changes: object) -> Condition:
    return dataclasses.replace(studies(CPU)["claim"].conditions[0], **changes)  # type: ignore[arg-type]


def findings(accuracies: dict[tuple[str, float | None], list[float]], **changes: object) -> Findings:
    """Seeds 0, 1, ...; what is given as tuning counts as held out."""
    arms = tuple(dict.fromkeys(arm for arm, _ in accuracies))
    found = Findings(digits(**{"arms": arms, "seeds": 10, **changes}))
    for key, values in accuracies.items():
        found.results[key] = {seed: Result({"accuracy": value}) for seed, value in enumerate(values)}
        found.chosen[key[0]] = key[1]
    return found


def test_every_arm_is_its_base_with_a_perturbation() -> None:
    for arm in ARMS.values():
        mine = algorithms.get(arm.method, **arm.hyper)
        assert isinstance(mine.perturbation, NoPerturbation) != bool(arm.base), arm
        if arm.base:
            base = algorithms.get(ARMS[arm.base].method)
            assert (type(mine.correction), mine.server) == (type(base.correction), base.server), arm
            assert mine.lr_decay == base.lr_decay


def test_the_claims_speak_of_arms() -> None:
    assert {name for claim in (*PAPER, *OURS) for name in (claim.left, claim.right)} <= set(ARMS)
    assert len(set(PAPER)) == 21
    for family in (PAPER, OURS):
        assert len(family) * 2 / 2**10 < 0.05, "ten seeds that agree must be enough for a verdict"


def test_the_digits_are_the_set_up_that_was_asked_for() -> None:
    condition, where = digits(), Where(CPU)
    assert len(condition.rhos) >= 6
    assert condition.seeds >= 10
    assert condition.arms == tuple(ARMS)
    config = condition.config("fedlesam-ahead", 0.3, 4, where)
    assert (config.samples, config.clients, config.active, config.epochs, config.batch_size) == (800, 40, 4, 5, 10)
    assert (config.rounds, config.split, config.seed, config.held_out) == (150, "dirichlet:0.1", 4, None)
    assert config.hyper["direction"] == "ahead"
    assert config.hyper["rho"] == 0.3


def test_rho_is_chosen_on_other_images_and_seeds() -> None:
    """The same training images, evaluated on others; no seed in common."""
    where = Where(CPU)
    for study in studies(CPU).values():
        for condition in study.conditions:
            if not condition.tuning_seeds:
                continue
            tuning = {seed for _, _, seed in claim.trials(condition, True, {})}
            results = {seed for _, _, seed in claim.trials(condition, False, dict.fromkeys(condition.tuned, 0.1))}
            assert min(tuning) == TUNING_SEED > max(results)
            tried = condition.config("fedlesam", 0.1, TUNING_SEED, where, tuning=True)
            shown = condition.config("fedlesam", 0.1, 0, where)
            assert tried.held_out == condition.held_out
            assert shown.held_out is None
            assert dataclasses.replace(tried, held_out=None, seed=0) == shown


def test_every_arm_has_the_same_budget() -> None:
    condition = digits()
    runs = list(claim.trials(condition, True, {}))
    for arm in condition.tuned:
        assert sorted((rho, seed) for name, rho, seed in runs if name == arm) == sorted(
            (rho, TUNING_SEED + i) for rho in condition.rhos for i in range(3)
        )
    assert f"= {len(runs)} runs" in condition.budget()


def test_the_best_rho_is_chosen_and_of_equal_ones_the_smaller() -> None:
    found = Findings(digits(arms=("fedavg", "fedsam", "fedlesam"), rhos=(0.3, 0.01, 0.1), tuning_seeds=2))

    def tuned(arm: str, rho: float, *scores: float) -> None:
        found.tuning[arm, rho] = {TUNING_SEED + i: Result({"accuracy": score}) for i, score in enumerate(scores)}

    tuned("fedsam", 0.01, 90, 91)
    tuned("fedsam", 0.1, 92, 91)
    tuned("fedsam", 0.3, 91, 92)
    tuned("fedlesam", 0.3, 99)
    found.choose()
    assert found.chosen == {"fedsam": 0.1, "fedlesam": None}, "a rho with a run missing is none"


def test_a_result_by_hand(tmp_path: Path) -> None:
    """Of ten rounds the last four; drift after the first round; sharpness at the end."""
    records = [{"round": i, "test_accuracy": i / 10, "seconds": float(i)} for i in range(10)]
    records[8]["dropped"] = {"3": "why"}  # type: ignore[assignment]
    config = dataclasses.replace(digits().config("fedlesam", 0.1, 0, Where(CPU)), rounds=10)
    (tmp_path / "probes.jsonl").write_text(
        '{"round": 0, "probe": "drift", "values": {"drift": 9.0}}\n'
        '{"round": 2, "probe": "drift", "values": {"drift": 0.2}}\n'
        '{"round": 4, "probe": "drift", "values": {"drift": 0.4}}\n'
        '{"round": 4, "probe": "sharpness", "values": {"ascent": 5.0}}\n'
        '{"round": 10, "probe": "sharpness", "values": {"ascent": 7.0}}\n'
    )
    found = claim.result(Run(tmp_path, config, {}, records), last=4).values
    assert found == pytest.approx({"accuracy": 75.0, "seconds": 4.5, "dropped": 1, "drift": 0.3, "sharpness": 7.0})


def test_verdicts_by_hand() -> None:
    """Ten seeds all in favour: p = 2 / 1024, corrected over a family of three; all against it: refuted."""
    up, down, mixed = [95.0 + i for i in range(10)], [80.0] * 10, [90.0, 91.0] * 5
    found = findings({("fedavg", None): mixed, ("fedsam", 0.1): up, ("fedlesam", 0.1): down, ("freesam", 1): mixed})
    claims = (Claim("fedsam", "fedavg"), Claim("fedlesam", "fedavg"), Claim("freesam", "fedavg"), Claim("fedsam", "x"))
    rows = judged("", claims, found).rows
    assert len(rows) == 3, "of an arm that was not run nothing is said"
    verdicts = [cells[-1].ours for cells in rows.values()]
    assert verdicts == ["confirmed", "refuted", "not confirmed"]
    assert [cells[4].ours for cells in rows.values()] == pytest.approx([6 / 1024, 6 / 1024, 1.0])
    first = rows["fedsam: more accurate than fedavg"]
    assert first[0].ours == pytest.approx(sum(up) / 10 - 90.5)
    assert first[6].ours == "10"


def test_verdicts() -> None:
    assert [verdict(*about) for about in ((1.0, 0.04), (-1.0, 0.04), (1.0, 0.06), (-1.0, 0.05))] == [
        "confirmed",
        "refuted",
        "not confirmed",
        "not confirmed",
    ]


def test_less_sharpness_is_in_favour() -> None:
    found = findings({("fedsam", 0.1): [1.0] * 10, ("fedlesam", 0.1): [1.0] * 10})
    for (arm, _), by_seed in found.results.items():
        for of in by_seed.values():
            of.values["sharpness"] = {"fedsam": 0.5, "fedlesam": 0.2}[arm]
    [row] = judged("", (Claim("fedlesam", "fedsam", "sharpness"),), found).rows.values()
    assert row[0].ours == pytest.approx(0.3)
    assert row[-1].ours == "confirmed"


def test_sharpness_at_the_same_rho_by_hand() -> None:
    """Half of its base's in every seed is a factor of .5; the rival's is taken at the same rho."""
    sharp = {("fedavg", None): [0.4, 0.2], ("fedsam", 0.1): [0.1, 0.1], ("fedlesam", 0.1): [0.2, 0.1]}
    found = Findings(digits(arms=("fedavg", "fedsam", "fedlesam"), tuning_seeds=0, seeds=2))
    for key, values in sharp.items():
        of = {"accuracy": 90.0, "relative_sharpness": 1.0}
        found.results[key] = {seed: Result({**of, "sharpness": value}) for seed, value in enumerate(values)}
    found.choose()
    rows = same_rho(found, 0.1).rows
    assert [cell.ours for cell in rows["fedlesam"]][1:4] == ["0.1500", "0.50", "0.50 to 0.50"]
    assert rows["fedlesam"][4].ours == "1.41", "the geometric mean of 2 and 1"
    assert [cell.ours for cell in rows["fedavg"]][2:6] == ["-"] * 4
    assert rows["fedsam"][2].ours == f"{(0.25 * 0.5) ** 0.5:.2f}"


def test_passes_are_counted() -> None:
    arms = ("fedavg", "fedsam", "fedlesam")
    rows = judged("", PAPER, findings({(arm, None): [1.0] for arm in arms}), with_cost=True).rows
    assert {text: (cells[0].ours, cells[-1].ours) for text, cells in rows.items()} == {
        "fedlesam: backward passes as fedavg's": (0, "confirmed"),
        "fedlesam: backward passes fewer than fedsam's": (1, "confirmed"),
    }


def test_gains_are_over_the_own_base() -> None:
    one = findings({("fedavg", None): [90.0, 92.0], ("scaffold", None): [10.0, 10.0], ("freesam", 0.3): [91.0, 94.0]})
    row = at_chosen(one).rows["freesam"]
    assert [cell.ours for cell in row[:4]] == ["0.3", "-", 92.5, 1.5]
    two = findings({("fedavg", None): [90.0, 92.0]}, arms=("fedavg", "freesam"))
    other = findings({}, arms=("fedavg", "fedsam"))
    over_base, over_sam = everywhere([one, two, other])
    mine, missing, never = over_base.rows["freesam - fedavg"]
    assert str(mine.ours) == "+1.50 [-4.85, +7.85]"
    assert missing.missing and not missing.ours
    assert (never.ours, never.missing) == ("-", "")
    assert over_sam.rows["freesam - fedsam"][2].ours == "-"
    assert over_rho(one, tuning=False).title.endswith("not used for choosing")


def test_nothing_is_finished(tmp_path: Path) -> None:
    study = studies(CPU)["claim"]
    table = make(study, [Findings(study.conditions[0])], tmp_path, ())
    assert table.missing()


def test_at_smoke_scale(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command, then the same again: nothing is trained twice."""
    assert not call("claim", "--scale", "smoke", "--out", str(tmp_path / "c"))
    said = capsys.readouterr()
    assert "tuning budget" in said.err
    for text in ("the claims of the paper", "our questions", "not used for choosing", "measured at the chosen rho"):
        assert text in said.out
    results = tmp_path / "c" / "results"
    names = {path.name for path in results.iterdir()}
    assert names == {f"claim.{ending}" for ending in ("md", "tex", "csv", "html", "png")} | {"claim-runs.csv"}
    with (results / "claim-runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 28
    probed = [run for run in runs if run["for"] == "results" and run["chosen"] == "yes"]
    assert {run["arm"] for run in probed} == {"fedavg", "scaffold", "fedsam", "fedlesam", "fedlesam-s", "random-round"}
    assert all(run["sharpness"] and run["relative_sharpness"] for run in probed)
    assert all(bool(run["drift"]) == (run["arm"] not in ("fedavg", "scaffold")) for run in probed)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("c/runs/*/summary.json")}
    page = (results / "claim.html").read_text()
    assert not call("claim", "--scale", "smoke", "--out", str(tmp_path / "c"), "--quiet")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("c/runs/*/summary.json")}
    assert (results / "claim.html").read_text() == page


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_others_at_smoke_scale(name: str, call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not call(name, "--scale", "smoke", "--out", str(tmp_path / "c"), "--seeds", "1")
    assert "fedlesam" in capsys.readouterr().out
    assert (tmp_path / "c" / "results" / f"{name}.md").exists()


@pytest.mark.parametrize("asked", [("claim",), ("table8", "--seeds", "2", "--only", "methods=fedavg")], ids=str)
def test_runs_of_the_command_share_a_stack(
    asked: tuple[str, ...], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that differ in seed or in rho; each folder says so."""
    widths, together = tmp_path / "widths", Stack.run

    def run(stack: Stack, jobs: Sequence[Callable[[], None]]) -> None:
        with widths.open("a") as file:  # the runs are in processes of their own
            file.write(f"{stack.width}:{len(jobs)} ")
        together(stack, jobs)

    monkeypatch.setattr(Stack, "run", run)
    assert not call(*asked, "--scale", "smoke", "--stack-runs", "8", "--out", str(tmp_path / "c"), "--quiet")
    configs = [RunFolder(path.parent).read_config() for path in tmp_path.glob("c/runs/*/summary.json")]
    assert {config.stack_runs for config in configs} == {8}
    shared = [tuple(map(int, text.split(":"))) for text in widths.read_text().split()]
    assert {width for width, _ in shared} == {8}
    assert sum(count for _, count in shared) == len(configs) > len(shared)


def test_a_dry_run_trains_nothing(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not call("claim", "--scale", "cpu", "--dry-run", "--out", str(tmp_path / "c"))
    said = capsys.readouterr().err
    assert " runs, " in said and " rounds" in said
    assert "confirmed: corrected p below .05" in said
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("arguments", [("claim", "table2"), ("claim", "--only", "methods=fedavg")])
def test_it_stands_alone(arguments: tuple[str, ...], call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments)
    assert "stands alone" in capsys.readouterr().err


def test_the_committed_tables_follow_from_the_committed_lines(tmp_path: Path) -> None:
    """Verdicts are computed: a line that is changed, or a rule, changes the page."""
    committed = Path(__file__).parents[2] / "docs" / "results" / "claim"
    for name in ("claim-cifar10", "claim-regimes", "claim-regimes-fine", "claim-sharpness"):
        claim.rebuild(studies(CPU)[name], Where(CPU), committed / f"{name}-runs.csv", tmp_path)
        assert (tmp_path / f"{name}.md").read_text("utf-8") == (committed / f"{name}.md").read_text("utf-8"), name
    with pytest.raises(ValueError, match="which is not in claim-cifar10"):
        claim.rebuild(studies(CPU)["claim-cifar10"], Where(CPU), committed / "claim-regimes-runs.csv", tmp_path)


def test_lines_of_six_digits_keep_ties(tmp_path: Path) -> None:
    condition = digits()
    assert claim._exact(94.4167, condition) == 100 * 6798 / 7200


def test_of_equal_rho_the_smaller_is_chosen_though_sums_are_rounded() -> None:
    """Both have 13,195 answers of 14,400; as a sum of floating-point numbers the second is larger."""
    found = Findings(digits(arms=("fedavg", "fedlesam"), rhos=(0.01, 0.03), tuning_seeds=2))
    for rho, answers in ((0.01, (6500, 6695)), (0.03, (6496, 6699))):
        found.tuning["fedlesam", rho] = {seed: Result({"accuracy": 100 * n / 7200}) for seed, n in enumerate(answers)}
    small, large = (found.validation("fedlesam", rho) for rho in (0.01, 0.03))
    assert small is not None and large is not None and small.mean < large.mean
    found.choose()
    assert found.chosen["fedlesam"] == 0.01


def test_the_fine_regimes_have_the_papers_rho_and_the_regime_of_theorem_2() -> None:
    study, coarse = (studies(CPU)[name] for name in ("claim-regimes-fine", "claim-regimes"))
    assert {condition.name for condition in coarse.conditions} < {condition.name for condition in study.conditions}
    assert all(set(condition.rhos) == {0.003, 0.01, 0.03, 0.1, 0.3, 1.0} for condition in study.conditions)
    small = study.conditions[-1].config("fedlesam", 0.01, 0, Where(CPU))
    assert (small.lr, small.epochs, small.active, small.clients) == (0.01, 1, 40, 40)

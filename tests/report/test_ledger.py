"""What was spent, and what it took to get somewhere."""

import csv
import io
import itertools
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.report.groups import Comparison, compare_runs
from fedlesam.report.ledger import default_targets, group_to_target, ledger, to_target
from fedlesam.report.page import templates
from fedlesam.report.summaries import costs, differences, gains, results, tables_of, to_targets
from fedlesam.report.tables import Cell, Column, Table, two
from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run


def run(
    accuracies: list[float | None],
    algorithm: str = "fedavg",
    seed: int = 0,
    *,
    sent: int = 1,
    memory: int = 0,
    split: str = RunConfig().split,
) -> Run:
    """A round sends `sent` MB down and one up, takes half a second and ten backward passes."""
    records = [
        {"round": t, "bytes_down": sent * 10**6, "bytes_up": 10**6, "seconds": 0.5, "backward_passes": 10}
        | ({} if value is None else {"test_accuracy": value})
        for t, value in enumerate(accuracies)
    ]
    known = [value for value in accuracies if value is not None]
    accuracy = {"last": known[-1], "mean_of_last": sum(known) / len(known), "best": max(known)} if known else {}
    summary = {"state": "finished", "accuracy": accuracy, "parameters": 500_000, "client_memory_bytes": memory}
    config = RunConfig(algorithm=algorithm, seed=seed, rounds=len(records), clients=4, split=split)
    return Run(Path(f"{algorithm}-{seed}"), config, summary, records)


def rows(table: Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table.csv())))


def test_to_a_target_by_hand() -> None:
    found = to_target(run([0.1, None, 0.5, 0.4, 0.6]), 0.5)
    assert found is not None
    assert (found.rounds, found.megabytes, found.seconds) == (3, 6.0, 1.5), "a round without evaluation counts"
    assert to_target(run([0.1, 0.2]), 0.5) is None
    assert to_target(run([None, None]), 0.5) is None


@given(st.lists(st.none() | st.floats(0, 1), min_size=1), st.floats(0.01, 1))
def test_the_first_evaluation_that_reaches_it(values: list[float | None], target: float) -> None:
    found = to_target(run(values), target)
    before = list(itertools.takewhile(lambda value: value is None or value < target, values))
    if len(before) == len(values):
        assert found is None
    else:
        assert found is not None
        assert found.rounds == len(before) + 1
        assert found.megabytes == pytest.approx(2 * found.rounds)


def comparison() -> Comparison:
    return compare_runs(
        [
            run([0.2, 0.4, 0.6, 0.8], "fedavg", 0),
            run([0.2, 0.3, 0.6, 0.8], "fedavg", 1),
            run([0.5, 0.7, 0.9, 0.9], "scaffold", 0, sent=3, memory=2_000_000),
            run([0.6, 0.7, 0.8, 0.9], "scaffold", 1, sent=3, memory=2_000_000),
            run([0.6, 0.2, 0.2, 0.2], "fedsam", 0),
            run([0.2, 0.2, 0.2, 0.2], "fedsam", 1),
        ]
    )


def test_the_table_to_a_target_has_fedavg_as_its_unit() -> None:
    avg, scaffold, sam = rows(to_targets(comparison(), [0.6]))
    assert [row["method"] for row in (avg, scaffold, sam)] == ["fedavg", "scaffold", "fedsam"]
    assert (avg["reached"], avg["rounds"], avg["rounds ×"]) == ("by all 2 seeds", "3.0", "1.0")
    assert float(scaffold["rounds"]) == 1.5
    assert float(scaffold["rounds ×"]) == pytest.approx(1.5 / 3)
    assert float(scaffold["MB sent ×"]) == pytest.approx(1.5 * 4 / (3 * 2))
    assert (sam["reached"], sam["rounds"], sam["rounds ×"]) == ("by 1 of 2 seeds", "", ""), "no mean over the lucky"


def test_a_target_never_reached_says_so() -> None:
    table = to_targets(comparison(), [0.95])
    assert {row["reached"] for row in rows(table)} == {
        "never (best 80.00 %)",
        "never (best 90.00 %)",
        "never (best 60.00 %)",
    }
    assert all(row["rounds"] == row["seconds ×"] == "" for row in rows(table))
    assert "| never (best 80.00 %) | – | – |" in table.markdown()
    reached = rows(to_targets(comparison(), [0.85]))
    assert [row["rounds ×"] for row in reached] == ["", "", ""], "no unit where FedAvg never gets there"
    assert [row["rounds"] for row in reached] == ["", "3.5", ""]
    [alone] = rows(to_targets(compare_runs([run([None])]), [0.5]))
    assert alone["reached"] == "never (never evaluated)"


def test_without_fedavg_there_are_no_multiples() -> None:
    table = to_targets(compare_runs([run([0.5, 0.6], "fedsam")]), [0.5])
    assert not any("×" in column.name for column in table.columns)
    assert "FedAvg is not among the runs" in table.caption
    assert "×" not in costs(compare_runs([run([0.5], "fedsam")])).csv()


def test_the_ledger_counts_a_round() -> None:
    found = ledger(comparison().groups[1])
    assert found is not None
    assert (found.backward_passes, found.megabytes_down, found.megabytes_up, found.seconds) == (10, 3, 1, 0.5)
    assert found.client_megabytes == 4.0, "the model's 2 MB and what the method keeps"
    avg, scaffold, _ = rows(costs(comparison()))
    assert [avg[name] for name in avg if name.endswith("×")] == ["1.0"] * 5
    assert [float(scaffold[f"{name} ×"]) for name in ("MB down", "MB up", "MB a client holds")] == [3, 1, 2]


def test_a_run_that_has_done_nothing_yet_costs_nothing() -> None:
    nothing = Run(Path("x"), RunConfig(algorithm="fedsam", clients=4, rounds=1), {}, [])
    both = compare_runs([run([0.5]), nothing])
    assert [row["method"] for row in rows(costs(both))] == ["fedavg"]
    assert group_to_target(both.groups[1], 0.5).spent is None
    assert results(both).shown()[1][:2] == ["fedsam", "–"]


def test_centralised_training_sends_nothing_and_is_no_baseline() -> None:
    alone = run([0.6], "fedavg", split="pooled")
    found = compare_runs([alone, run([0.5], "fedsam")])
    assert found.baseline is None, "it is not FedAvg"
    both = compare_runs([run([0.5]), alone])
    _, costs_of_it = rows(costs(both))
    assert costs_of_it["method"] == "centralised SGD"
    assert (costs_of_it["MB down"], costs_of_it["MB up"], costs_of_it["backward passes ×"]) == ("", "", "")
    assert float(costs_of_it["backward passes"]) > 0
    _, reached = rows(to_targets(both, [0.5]))
    assert (reached["reached"], reached["rounds"], reached["MB sent"], reached["rounds ×"]) == ("yes", "1.0", "", "")


def test_default_targets_are_what_fedavg_reaches() -> None:
    assert default_targets(comparison()) == [0.43, 0.48], "FedAvg's mean over seeds is 0.4875"
    assert default_targets(compare_runs([run([None])])) == []
    weakest = compare_runs([run([0.8], "fedsam"), run([0.5], "scaffold")])
    assert default_targets(weakest) == [0.45, 0.5]


def test_gains_are_over_the_first_method() -> None:
    """Of scaffold one seed is there, of fedsam both; fedavg is the first."""
    runs = [run([0.4], "fedavg", 0), run([0.5], "fedavg", 1), run([0.6], "scaffold", 0)]
    table = gains(compare_runs([*runs, run([0.5], "fedsam", 0), run([0.8], "fedsam", 1)]))
    assert table.title == "Over fedavg, paired by seed"
    [row] = table.shown()
    assert row[:4] == ["fedsam", "+20.00", "-107.06", "+147.06"] and row[-1] == "2"
    assert not gains(compare_runs(runs[:1])).rows


def test_results_are_ranked_and_differences_are_only_those() -> None:
    assert [row["method"] for row in rows(results(comparison()))] == ["scaffold", "fedavg", "fedsam"]
    table = differences(comparison())
    assert [column.name for column in table.columns] == ["method", "seeds"], "nothing but the method differs"
    assert table.shown()[0] == ["fedavg", "0, 1"]
    assert [t.key for t in tables_of(comparison(), [0.5])] == [
        "results",
        "gains",
        "costs",
        "to-target",
        "differences",
    ]
    assert [t.key for t in tables_of(comparison(), [])] == ["results", "gains", "costs", "differences"]


NASTY = ["a|b", "x & y", "100%", "a_b", "{c}", "\\d", "<i>", "=1+1", "–", "#~^$"]


def nasty() -> Table:
    cells: list[list[Cell]] = [[name, 1 / 3] for name in NASTY]
    return Table("k", "t", [Column("method"), Column("value %", two)], [*cells, ["none", None]])


def test_csv_keeps_every_digit() -> None:
    found = rows(nasty())
    assert [float(row["value %"]) for row in found[:-1]] == [1 / 3] * len(NASTY)
    assert found[-1]["value %"] == ""
    assert [row["method"] for row in found[:-1]] == [n if n != "=1+1" else "'=1+1" for n in NASTY]


def test_markdown_has_the_same_cells_in_every_row() -> None:
    lines = nasty().markdown().splitlines()
    unescaped = [line.replace("\\\\", "").replace("\\|", "") for line in lines]
    assert {line.count("|") for line in unescaped} == {3}
    assert lines[1] == "|---|---:|"
    assert lines[2] == "| a\\|b | 0.33 |"


def test_latex_escapes_what_it_reads() -> None:
    text = nasty().latex()
    assert text.startswith("\\begin{tabular}{lr}\n\\toprule\nmethod & value \\% \\\\\n\\midrule\n")
    for escaped in (
        "x \\& y",
        "100\\%",
        "a\\_b",
        "\\{c\\}",
        "\\textbackslash{}d",
        "\\#\\textasciitilde{}",
        "\\textless{}i",
    ):
        assert escaped in text
    assert text.count("\\\\\n") == len(NASTY) + 2


def test_html_is_escaped() -> None:
    group = {"number": 0, "light": "#000000", "dark": "#ffffff", "line": "--"}
    text = templates().get_template("macros.html.j2").module.data_table(nasty(), defaultdict(lambda: group))  # type: ignore[attr-defined]
    assert "<i>" not in text
    assert text.count("<tr") == len(NASTY) + 2

"""Tables of the paper that leave a domain out: what is run, what stands beside what, and what is missing."""

import csv
import dataclasses
import re
from pathlib import Path
from statistics import fmean

import pytest
from domain_files import write_known

from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run
from reproduction import plan, tables
from reproduction.context import Context
from reproduction.items import ITEMS, RunSpec
from reproduction.paper import paper_tables
from reproduction.plan import Only, parse_only
from reproduction.rankings import places
from reproduction.reproduce import Outcome, Request, available, reproduce
from reproduction.result_table import Block
from reproduction.results import Results
from reproduction.scales import DOMAIN_CHOICES, SCALES, Scale, on_scale, settle
from reproduction.writing import markdown

CPU, FULL = SCALES["cpu"], SCALES["full"]
SMALL = {"model": "cnn:width=4", "rounds": 2, "epochs": 1, "lr": 0.05, "batch_size": 8}
PARTS = tuple(paper_tables()["table3"].parts)
SIX = "methods=fedavg,scaffold,fedsam,fedgamma,fedlesam,fedlesam-s"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "cache"))


def small(scale: Scale) -> Scale:
    """The same with pictures of 12 x 12, a tiny network and two rounds."""
    assert scale.domains is not None
    return dataclasses.replace(
        scale, seeds=1, domains=dataclasses.replace(scale.domains, settings=SMALL, many={}, options="size=12")
    )


def block(outcome: Outcome, name: str, title: str) -> Block:
    (table,) = (table for table in outcome.tables if table.name == name)
    (found,) = (block for block in table.blocks if block.title == title)
    return found


def test_pacs_stands_in_from_end_to_end(tmp_path: Path) -> None:
    """Two methods on its four targets and both settings, really trained; averages, places, gains and counts."""
    write_known(tmp_path / "data" / "pacs", "pacs", 3)
    items = [ITEMS[name] for name in ("table3", "table4", "table6")]
    only = parse_only("data=pacs,methods=fedavg,fedlesam")
    outcome = reproduce(Request(items, small(CPU), only, data_dir=str(tmp_path / "data")), tmp_path / "s")
    assert not outcome.failed
    splits = {path.name.split("leave-out-")[1].rsplit("-", 1)[0] for path in tmp_path.glob("s/runs/fedavg-*")}
    targets = ("art_painting", "cartoon", "photo", "sketch")
    assert splits == {*targets, *(f"{target}-10" for target in targets)}

    table = block(outcome, "table3", f"{PARTS[0]}; last round")
    assert table.columns == (*(f"pacs/{target}" for target in targets), "average")
    averages = {}
    for method, cells in table.rows.items():
        *each, average = (cell.ours for cell in cells)
        assert all(isinstance(value, float) and 0 <= value <= 100 for value in each)
        assert average == pytest.approx(fmean(each))  # type: ignore[type-var]
        assert all(cell.paper is None for cell in cells), "the paper prints nothing for PACS"
        averages[method] = float(average)  # type: ignore[arg-type]

    order = block(outcome, "table3", f"{PARTS[0]}; place by the average, ours on pacs / the paper's")
    assert order.columns == ("pacs / officehome", "pacs / domainnet")
    assert {method: cells[0].ours for method, cells in order.rows.items()} == places(averages)
    assert [cell.paper for cell in order.rows["fedavg"]] == [2, 2]  # 78.42 and 70.65 after 78.48 and 71.56
    assert block(outcome, "table3", f"{PARTS[1]}; last round").rows.keys() == table.rows.keys()

    four = block(outcome, "table4", "average accuracy, last round")
    assert four.columns == ("cifar10", "cifar100", "officehome", "domainnet", "pacs")
    left, _, stood_for, _, ours = four.rows["fedavg"]
    assert (left.missing, stood_for.missing) == ("left out by --only", "pacs stands in for it")
    assert isinstance(ours.ours, float) and ours.paper is None
    six = block(outcome, "table6", "")
    assert [cell.ours for cell in six.rows["pacs"]] == [84, 7, 4, "3 x 12 x 12"]

    text = (tmp_path / "s" / "results" / "table3.md").read_text()
    assert CPU.domains and all(f"reduction: {sentence}" in text for sentence in CPU.domains.reductions)
    linked = re.findall(r'href="(report-.*?)"', (tmp_path / "s" / "results" / "index.html").read_text())
    assert len(linked) == 8 and all((tmp_path / "s" / "results" / name).exists() for name in linked)
    assert len(list((tmp_path / "s" / "results").glob("table3-pacs-*.png"))) == 8


def test_what_is_missing_is_a_hole_and_the_others_go_on(tmp_path: Path) -> None:
    """OfficeHome is there, DomainNet is not: table 3 at full scale in the paper's shape."""
    write_known(tmp_path / "officehome" / "OfficeHomeDataset_10072016", "officehome")
    scale = dataclasses.replace(small(FULL), name="full")
    only = parse_only("methods=fedavg,clients=1")
    said: list[str] = []
    items = [ITEMS[name] for name in ("table3", "table6")]
    outcome = reproduce(Request(items, scale, only, data_dir=str(tmp_path)), tmp_path / "s", log=said.append)
    assert not outcome.failed
    table = block(outcome, "table3", f"{PARTS[0]}; last round")
    assert table.columns == paper_tables()["table3"].columns
    cells = table.rows["fedavg"]
    assert all(isinstance(cell.ours, float) and not cell.missing for cell in cells[:4])
    assert all(cell.ours is None and cell.missing.startswith("domainnet: not found in ") for cell in cells[4:])
    assert [cell.paper for cell in cells] == [
        figure for figure, _ in paper_tables()["table3"].parts[PARTS[0]]["fedavg"]
    ]
    assert any("domainnet" in text for text in said)
    six = block(outcome, "table6", "")
    assert [cell.ours for cell in six.rows["officehome"]] == [260, 65, 4, "3 x 224 x 224"]
    assert six.rows["domainnet"][0].missing.startswith("domainnet: not found") and six.rows["domainnet"][2].paper == 6


@pytest.mark.parametrize("name", ["cpu", "full"])
def test_nothing_there_gives_whole_tables_of_holes(name: str, tmp_path: Path) -> None:
    items = [ITEMS[item] for item in ("table3", "table4", "fig4")]
    only = parse_only("data=officehome,domainnet,pacs")
    outcome = reproduce(Request(items, SCALES[name], only, data_dir=str(tmp_path)), tmp_path / "s")
    with (tmp_path / "s" / "results" / "table3.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for part, methods in paper_tables()["table3"].parts.items():
        mine = [row for row in rows if row["part"] == f"{part}; last round"]
        assert {row["row"] for row in mine} == set(methods)
        assert len({row["column"] for row in mine}) == {"full": 10, "cpu": 5}[name]
    assert all(not row["ours"] and "not found in" in row["missing"] for row in rows)
    averages, four = (table.blocks[0] for table in outcome.tables[1:])
    assert "not found in" in averages.rows["fedavg"][-1].missing
    assert "not found in" in markdown(outcome.tables[1])
    assert tuple(four.rows) == {"full": ("officehome", "domainnet"), "cpu": ("pacs",)}[name]
    assert all("not found in" in cell.missing for _, _, cell in four.cells())


def test_full_scale_is_the_papers_protocol() -> None:
    planned = plan.make([ITEMS["table3"]], Only(), FULL, 1, "d")
    assert len(planned.runs) == 240 and not planned.missing
    (config,) = planned.runs[RunSpec("fedlesam-s", "domainnet", "infograph", 10, 0.2)]
    expected = {
        "data": "domainnet",
        "data_dir": "d",
        "model": "vit-b32",
        "split": "leave-out:infograph,10",
        "clients": None,
        "active": 0.2,
        "rounds": 400,
        "lr": 0.001,
        "epochs": 5,
        "batch_size": 32,
        "samples": None,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.hyper["rho"] == 0.01 and any("rho .01" in text for text in DOMAIN_CHOICES)
    (plain,) = planned.runs[RunSpec("fedavg", "officehome", "real-world", 1, 1.0)]
    assert plain.split == "leave-out:real-world" and "rho" not in plain.hyper


def test_cpu_scale_is_the_reduction_it_says() -> None:
    """30 images of a class, 8 rounds of an epoch; 20 of two where a fifth of the clients is active."""
    few, many = (
        settle(RunSpec("fedgamma", "pacs", "photo", clients, active), CPU, 0, None, 1)
        for clients, active in ((1, 1.0), (10, 0.2))
    )
    assert isinstance(few, RunConfig) and isinstance(many, RunConfig)
    assert few.data == many.data == "pacs:size=96,limit=30"
    assert (few.model, few.lr, few.hyper["rho"]) == ("efficientnet-lite0", 0.05, 0.05)
    assert (few.split, few.rounds, few.epochs) == ("leave-out:photo", 8, 1)
    assert (many.split, many.rounds, many.epochs) == ("leave-out:photo,10", 20, 2)
    seen = [c.rounds * int(c.epochs or 0) * c.active for c in (few, many)]
    assert seen[0] == pytest.approx(seen[1])
    found = settle(RunSpec("fedlesam-s", "pacs", "photo", 1, 1.0, ratio=10.0), CPU, 0, None, 1)
    assert isinstance(found, RunConfig) and found.hyper["rho"] == 0.5


def test_what_a_stand_in_is_asked_for() -> None:
    """Every method and setting of the paper on four targets, once, not once for each data set it stands in for."""
    specs = on_scale(ITEMS["table3"], CPU).specs
    assert len(specs) == len(set(specs)) == 12 * 4 * 2
    assert on_scale(ITEMS["table2"], CPU) == ITEMS["table2"] and on_scale(ITEMS["table3"], FULL) == ITEMS["table3"]
    planned = plan.make([ITEMS["table3"]], parse_only(f"data=pacs,{SIX},clients=1"), CPU, 1)
    assert len(planned.runs) == 24


def test_a_dry_run_does_not_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(config: RunConfig) -> None:
        raise AssertionError(config.data)

    monkeypatch.setattr("reproduction.reproduce.load_data", never)
    request = Request([ITEMS["table3"]], small(CPU), parse_only("methods=fedavg,clients=1"), data_dir=str(tmp_path))
    assert len(available(request, decode=False).missing) == 4
    write_known(tmp_path / "pacs", "pacs")
    assert len(available(request, decode=False).runs) == 4


def test_the_ablation_on_a_stand_in_by_hand(tmp_path: Path) -> None:
    """One target of four is missing at one ratio: that mean is missing, the others are there."""
    item = on_scale(ITEMS["fig4"], CPU)
    mine = [spec for spec in item.specs if spec.data == "pacs"]
    assert len(mine) == 4 * 6
    value = {"art_painting": 0.5, "cartoon": 0.6, "photo": 0.7, "sketch": 0.2}
    runs = {
        spec: [Run(tmp_path, RunConfig(), {"accuracy": {"last": value[spec.split] + (0.1 if spec.ratio else 0)}}, [])]
        for spec in mine
        if (spec.split, spec.ratio) != ("photo", 100.0)
    }
    context = Context(Results(CPU, runs, {}, 1), Only(), tmp_path, None)
    (made,) = tables.make(dataclasses.replace(item, specs=tuple(mine)), context).blocks
    base, *others, last = made.rows["pacs"]
    assert base.ours == pytest.approx(50) and [cell.ours for cell in others] == pytest.approx([60] * 4)
    assert last.ours is None and last.missing == "not run"


def test_smoke_leaves_domains_out() -> None:
    planned = plan.make([ITEMS["table3"]], Only(), SCALES["smoke"], 1)
    assert not planned.runs and set(planned.missing.values()) == {"no domains are embedded"}

"""The figures we quote are the paper's."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedlesam.algorithms import PAPER
from reproduction.items import ITEMS, METHODS
from reproduction.paper import paper_tables

SOURCE = Path(__file__).parents[3] / "shared" / "paper" / "tables.json"


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    if not SOURCE.exists():
        pytest.skip("the paper's tables, ../shared/paper/tables.json, are not here")
    found: dict[str, Any] = json.loads(SOURCE.read_text())
    return found


@pytest.mark.parametrize(("name", "key"), [("table2", "cifar"), ("table3", "domain")])
def test_accuracies(source: dict[str, Any], name: str, key: str) -> None:
    theirs = {part: rows for part, rows in source[key].items() if part != "rounds"}
    ours = paper_tables()[name]
    assert ours.parts.keys() == theirs.keys()
    for part, rows in theirs.items():
        assert ours.parts[part].keys() == rows.keys()
        for method, cells in rows.items():
            assert {c: list(f) for c, f in zip(ours.columns, ours.parts[part][method], strict=True)} == cells


@pytest.mark.parametrize(
    ("name", "part", "key"),
    [
        ("table4", "average", "variants_average"),
        ("table5", "cost", "to_target_dirichlet_0.1"),
        ("table7", "cost", "cost_per_round"),
        ("table8", "time", "wall_clock_per_round"),
        ("table9", "cost", "to_target_pathological_3"),
    ],
)
def test_other_tables(source: dict[str, Any], name: str, part: str, key: str) -> None:
    rows = {k: v for k, v in source[key].items() if k not in ("columns", "rows", "unit", "setting")}
    ours = paper_tables()[name]
    assert ours.parts[part].keys() == rows.keys()
    for method, cells in rows.items():
        assert [value for value, _ in ours.parts[part][method]] == (cells if isinstance(cells, list) else [cells])


def test_the_methods_are_ours() -> None:
    assert set(METHODS) == {make.__name__.replace("_", "-") for make in PAPER}
    for name in ("table4", "table5", "table7", "table8", "table9"):
        for rows in paper_tables()[name].parts.values():
            assert rows.keys() <= set(METHODS)


def test_every_item_is_there() -> None:
    numbered = [f"table{n}" for n in range(1, 10)] + [f"fig{n}" for n in range(1, 7)]
    assert list(ITEMS) == [*numbered, "theory"]
    assert len(ITEMS["table2"].specs) == 12 * 8 * 2
    assert len(ITEMS["table3"].specs) == 12 * 10 * 2
    assert {spec.plain for name in ("table5", "table8", "table9", "fig3", "fig6") for spec in ITEMS[name].specs} <= set(
        ITEMS["table2"].specs
    ), "what table 2 trained is not trained again"


def test_the_wheel_has_no_reproduction() -> None:
    """It is used from a checkout."""
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert settings["packages"] == {"find": {"include": ["fedlesam*"]}}
    assert (root / "reproduction" / "paper.toml").exists() and not (root / "fedlesam" / "experiments").exists()

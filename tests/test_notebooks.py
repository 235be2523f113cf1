"""The notebooks: executed by Jupyter, shown with what they printed, and at home there."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedlesam as fl
from fedlesam.core.history import HEAD, TAIL, History
from fedlesam.runs.notebook import NotebookBars

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kinds(cell: Any) -> list[list[str]]:
    """Of what a cell shows."""
    return [sorted(output.get("data", {"text": ""})) for output in cell.get("outputs", ())]


def test_there_are_three_and_the_site_has_them() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["add-your-own-method", "quickstart", "see-the-flatness"]
    for path in NOTEBOOKS:
        assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_was_executed_is_in_the_file(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "from top to bottom, once"
    assert any("image/png" in kind for cell in code for kind in kinds(cell)), "a picture"
    text = path.read_text(encoding="utf-8")
    assert len(text) < 120_000
    assert not re.search(r"Traceback|/home/|/root/|/tmp/|Warning", text)


@pytest.mark.extras
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own packages
def test_jupyter_executes_it_and_shows_the_same_kinds_of_output(path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    pytest.importorskip("ipykernel", reason="needs the extra `notebooks`")
    notebook = script("notebooks").executed(path)
    assert [kinds(cell) for cell in notebook.cells] == [kinds(cell) for cell in cells(path)]
    streams = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"
    ]
    assert streams == [], "a bar, and no lines beside it"


@pytest.mark.extras
def test_a_page_of_the_site_has_every_cell_and_output() -> None:
    pytest.importorskip("mkdocstrings", reason="needs the extra `docs`")
    pages = script("site_pages")
    for path in NOTEBOOKS:
        page = pages.notebook_page(json.loads(path.read_text(encoding="utf-8")))
        for cell in cells(path):
            assert "".join(cell["source"]) in page
        assert page.count("data:image/png") == sum("image/png" in kind for cell in cells(path) for kind in kinds(cell))


def test_bars_are_one_output_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    bars = NotebookBars()
    monkeypatch.setattr(bars, "_show", shown.append)
    for done in range(101):
        bars.update(1, "<b>", done, 100, f"loss {done}")
    assert len(shown) < 20, "not a hundred"
    assert shown[-1]["text/plain"] == "<b> 100/100  loss 100"
    assert "&lt;b&gt;" in shown[-1]["text/html"]
    assert 'value="100" max="100"' in shown[-1]["text/html"]


def test_a_federation_and_its_history_show_themselves() -> None:
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    clients = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]
    fed = fl.Federation(torch.nn.Linear(3, 2), clients, "fedlesam", active=2, test=(x, y))
    assert repr(fed.history) == "History(no rounds yet)"
    for _ in range(HEAD + TAIL + 2):
        fed.round()
    assert isinstance(fed.history, History)
    accuracy = fed.history[-1].test_accuracy
    assert f"test accuracy {accuracy:.4g}" in repr(fed.history)
    rows = re.findall(r"<tr><td>(\d+)</td>", fed.history._repr_html_())
    assert rows == ["0", "1", "2", "5", "6", "7", "8", "9"]
    page = fed._repr_html_()
    assert "fedlesam: Algorithm(perturbation=GlobalAscent" in page
    assert "4, 2 active in a round" in page

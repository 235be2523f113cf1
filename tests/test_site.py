"""The documentation site: it builds without a warning, and its API reference has every public name."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocstrings", reason="needs the extra `docs`")

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/scripts/site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that fedlesam.flower imports
def test_the_reference_has_every_public_name(site: Path, pages: ModuleType) -> None:
    for room, path in pages.ROOMS.items():
        module = importlib.import_module(f"fedlesam.{path}".rstrip("."))
        names = [n for n in getattr(module, "__all__", vars(module)) if not n.startswith("_")]
        named = {n for n in names if not isinstance(getattr(module, n), ModuleType)}
        if path == "algorithms":
            named = {make.__name__ for make in module.CATALOGUE.values()} | {"find", "get", "hyperparameters"}
        page = (site / "api" / f"{room}.html").read_text(encoding="utf-8")
        headings = {anchor.rpartition(".")[2] for anchor in re.findall(r'id="(fedlesam[\w.]+)"', page)}
        assert named <= headings, f"{room}: {sorted(named - headings)}"


def test_every_block_is_rendered(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "```" not in page.read_text(encoding="utf-8"), page


def test_lists_are_whole(site: Path) -> None:
    """Commands, tables and paragraphs of an item do not end the list."""
    steps = (site / "deploy.html").read_text("utf-8").partition('id="three-machines"')[2].partition("<h2")[0]
    assert steps.count("<ol>") == 1
    assert len(re.findall(r"^<li>", steps, re.MULTILINE)) == 9
    assert steps.count("<pre>") >= 9 and "<table>" in steps
    for page in site.rglob("*.html"):
        broken = re.findall(r"(?:[.:]\s|>)- <strong>[A-Z][^<]*</strong>", page.read_text("utf-8"))
        assert not broken, (page, broken)


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|link)[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8"))
        assert not [address for address in loaded if "fedlesam/fedlesam" not in address], page


def test_an_override_shows_the_parameters_it_inherits(site: Path) -> None:
    page = re.sub(r"<[^>]+>|\s+", " ", (site / "api" / "rules.html").read_text(encoding="utf-8"))
    part = page[page.index("SCAFFOLD: turn by c - c_i") :]
    assert "w, the global model that the round started from" in part[: part.index("FedCM")]
    assert "Arguments of the" not in page
    assert "Args:" not in page

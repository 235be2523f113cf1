"""The lower bounds of the dependencies are those that `make test-lowest` runs the commands with."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import fedlesam
from fedlesam.runs.explain import ERRATA

HERE = Path(__file__).parent.parent


def test_every_bound_is_tried() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = dict(line.split(">=") for line in project["dependencies"])
    lines = (HERE / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert tried == bounds
    assert "make test-lowest" in (HERE / ".ci" / "run").read_text(encoding="utf-8")


def test_what_the_readme_runs_needs_no_extra() -> None:
    """`fedlesam probe ... hessian` is SciPy's."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(line.startswith("scipy>=") for line in project["dependencies"])
    assert "probes" not in project["optional-dependencies"]


def test_there_is_one_version_and_one_address() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dynamic"] == ["version", "readme"]  # from fedlesam/__init__.py and setup.py
    citation = (HERE / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fedlesam.__version__}\n" in citation
    dated = re.search(r"^date-released: (.+)$", citation, re.M)
    sections = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (HERE / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert sections[:2] == [("Unreleased", ""), (fedlesam.__version__, dated[1] if dated else "")]
    dates = [date for _, date in sections[1:]]
    assert all(dates) and dates == sorted(dates, reverse=True), "newest first"
    source = project["urls"]["Source"]
    assert all(address.startswith(source) for address in project["urls"].values())
    check = (HERE / "fedlesam" / "flower" / "check.py").read_text(encoding="utf-8")
    assert f'GUIDE = "{source}/blob/main/docs/deploy.md"' in check
    assert f"{source}/blob/main/docs/errata.md" == ERRATA


def test_the_readme_of_a_package_index_has_absolute_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of an index has no files beside it."""
    pytest.importorskip("setuptools")
    made: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", made.update)
    runpy.run_path(str(HERE / "setup.py"))
    source = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    targets = re.findall(r"\]\(([^)]+)\)", made["long_description"])
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    ours = [target for target in targets if "fedlesam/fedlesam/" in target]
    files = [re.sub(r"^https://[^/]+/fedlesam/fedlesam/(blob/)?main/", "", target).partition("#")[0] for target in ours]
    assert files and all((HERE / name).exists() for name in files)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", made["long_description"])
    assert pictures and all(picture.startswith("https://raw.githubusercontent.com/") for picture in pictures)
    assert source in made["long_description"]

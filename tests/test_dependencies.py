"""The lower bounds of the dependencies are those that `make test-lowest` runs the commands with."""

import tomllib
from pathlib import Path

import fedlesam

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
    assert project["dynamic"] == ["version"]  # from fedlesam/__init__.py
    citation = (HERE / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fedlesam.__version__}\n" in citation
    source = project["urls"]["Source"]
    assert all(address.startswith(source) for address in project["urls"].values())
    check = (HERE / "fedlesam" / "flower" / "check.py").read_text(encoding="utf-8")
    assert f'GUIDE = "{source}/blob/main/docs/deploy.md"' in check

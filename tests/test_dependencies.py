"""The lower bounds of the dependencies are those that `make test-lowest` runs the commands with."""

import tomllib
from pathlib import Path

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

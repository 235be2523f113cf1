"""`fedlesam probe` from Python: the same numbers, and no process is started."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedlesam.cli import cli
from fedlesam.probes.base import Tick
from fedlesam.probes.hessian import Hessian
from fedlesam.report import measured
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.measure import measure
from fedlesam.runs.runner import execute

SMALL = RunConfig(algorithm="fedsam", clients=4, active=2, rounds=1, samples=80, threads=1, model="mlp")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "sam"
    execute(configs.resolve(SMALL), path)
    return path


def test_it_measures_what_the_command_measures(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = ("sharpness:steps=2,samples=40,local=no", "surface:dims=1,points=3,samples=20")
    said = CliRunner().invoke(cli, ["probe", str(run), "--probe", probes[0], "--probe", probes[1], "--json"])
    lines = json.loads(said.stdout)["readings"]
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    seen: list[tuple[str, str]] = []

    def progress(path: Path, probe: str) -> Tick:
        seen.append((path.name, probe))
        return lambda done, of: None

    found = measure([run], probes, progress=progress)
    assert seen == [("sam", "sharpness"), ("sam", "surface")]
    assert found[0].reading is not None
    assert found[0].reading.values == lines[0]["values"]
    assert (found[1].file, found[1].dims) == (Path(lines[1]["file"]), 1)
    assert measured.names(found) == {run: "fedsam"}
    assert [table.key for table, _ in measured.tables(found)] == ["sharpness"]
    assert {picture.name for picture in measured.draw(found, run)} == {"surface-1d.png", "surface-1d.pdf"}


def test_probes_as_objects(run: Path) -> None:
    (found,) = measure([run], [Hessian(k=1, draws=2, samples=20)])
    assert found.reading is not None
    assert found.reading.metadata["k"] == 1

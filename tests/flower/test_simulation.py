"""The same app on Flower's own simulation back end, which gives every virtual node its partition-id."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")
pytest.importorskip("ray", reason="needs Flower's simulation: pip install 'flwr[simulation]'")

from machines import BIN, Deployment, wait
from test_deployment import index, simulation

pytestmark = [
    pytest.mark.extras,
    pytest.mark.slow,  # Ray's start on two cores would take the deployment's tests beyond their five minutes
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left-over processes in /proc"),
]


def test_flwr_run_with_the_simulation_back_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Deployment(tmp_path, secure=False) as deployment:
        flags = ["--insecure", "--simulation", "--port", str(deployment.port)]
        machine = deployment.start(
            "superlink", [str(BIN / "flower-superlink"), *flags, "--disable-runtime-dependency-installation"]
        )
        wait("the SuperLink", lambda: "Uvicorn running" in machine.said(), 60)
        folder, nodes = tmp_path / "server", ("--federation-config", "num-supernodes=3")
        settings = {"algorithm": "fedlesam-d", "rounds": 2, "active": 2, "minimum": 1.0, "patience": 300.0}
        run = deployment.run(*nodes, folder=str(folder), **settings)
        deployment.finish(run)
    fed = simulation(monkeypatch, "fedlesam-d", 2)
    ledger = list(fed.run(2))
    found = index(folder)
    assert [r["bytes_up"] for r in found["rounds"]] == [record.bytes_up for record in ledger]
    named = load_file(folder / found["state"]["file"])
    torch.testing.assert_close(named["weights"], fed.weights, atol=1e-5, rtol=0)
    assert json.dumps(found["rounds"][0]["dropped"]) == "{}"

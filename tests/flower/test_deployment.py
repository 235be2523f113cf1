"""Real processes: a SuperLink and three SuperNodes on loopback, with TLS and SuperNode authentication."""

import json
import os
import signal
import ssl
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from worlds import federate

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.app import Context, RecordDict
from machines import APP, Deployment, members, three_nodes, wait
from proxy import NGINX, proxy

from fedlesam import Federation
from fedlesam.flower import checkpoint
from fedlesam.flower.keys import make_keys

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left-over processes in /proc"),
]

ROUNDS = 5


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Nodes 0 and 1 keep their memory in files, node 2 does not. Node 1 is behind a proxy, and has our executor."""
    folder = tmp_path_factory.mktemp("deployment")
    memory = {f"node{client}": f'memory="{folder / "memory"}"' for client in (0, 1)}
    with three_nodes(folder, forked=1, through=proxy if NGINX else None, **memory) as running:
        yield running
    assert not any(members(machine.home) for machine in running.machines.values()), "no process is left behind"


def simulation(monkeypatch: pytest.MonkeyPatch, algorithm: str, active: int) -> Federation:
    """From the same app's own functions."""
    monkeypatch.syspath_prepend(str(APP))
    from flower_cifar import task

    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    contexts = [Context(0, 0, {"partition-id": client}, RecordDict(), config) for client in range(3)]
    data = task.load(config)
    return federate(
        task.model_for(config, data),
        [task.load_client(context) for context in contexts],
        algorithm,
        task.local_training(contexts[0]),
        active=active,
        seed=config["seed"],
        threads=1,
    )


def index(folder: Path) -> dict[str, Any]:
    path = folder / checkpoint.INDEX
    return json.loads(path.read_text())["checkpoint"] if path.exists() else {"round": 0, "rounds": []}


EQUAL = ("fedlesam-s", "fedsmoo")
ACTIVE = 2
PATIENT = {"timeout": 300.0, "patience": 300.0}


@pytest.fixture(scope="module")
def started(deployment: Deployment) -> dict[str, str]:
    """Their runs, by method: they share the nodes, and one waits for Flower's polls while the other computes."""
    every = {"active": ACTIVE, "minimum": 1.0, "rounds": ROUNDS, **PATIENT}
    return {name: deployment.run(algorithm=name, folder=str(deployment.folder / name), **every) for name in EQUAL}


@pytest.mark.parametrize("algorithm", EQUAL)
def test_deployment_equals_simulation(
    algorithm: str, deployment: Deployment, started: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = deployment.folder / algorithm
    fed = simulation(monkeypatch, algorithm, ACTIVE)
    ledger = list(fed.run(ROUNDS))
    deployment.finish(started[algorithm])
    found = index(folder)
    assert found["round"] == ROUNDS
    assert [r["dropped"] for r in found["rounds"]] == [{}] * ROUNDS
    for column in ("active", "bytes_down", "bytes_up", "lr"):
        assert [r[column] for r in found["rounds"]] == [getattr(record, column) for record in ledger], column
    named = load_file(folder / found["state"]["file"])
    moved = fed.weights - simulation(monkeypatch, algorithm, ACTIVE).weights
    assert moved.abs().max() > 0.01, "or the comparison shows nothing"
    torch.testing.assert_close(named["weights"], fed.weights, atol=1e-5, rtol=0)
    for slot in ("perturbation", "correction", "server"):
        for name, value in getattr(fed.state, slot).items():
            torch.testing.assert_close(named[f"{slot}/{name}"], value, atol=1e-5, rtol=0)
    result = fed.model
    result.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(nn.utils.parameters_to_vector(result.parameters()), named["weights"])


@pytest.mark.skipif(NGINX is None, reason="needs nginx: apt install nginx")
def test_the_proxy_passes_what_supernodes_need_and_nothing_else(deployment: Deployment) -> None:
    """Node 1 has trained through it, above; control and runtime cannot be reached, however the path is written."""
    import httpx

    port, log = deployment.proxy or (0, Path())
    passed = log.read_text()
    assert passed.count('"POST /v1/fleet/push-messages HTTP/1.1" 200') >= 2
    assert '" 4' not in passed.replace('" 499', ""), "no limit is reached by a node at work"
    verify = ssl.create_default_context(cafile=str(deployment.keys / "ca.crt"))
    refused = ("control/list-nodes", "control/start-run", "runtime/acquire-task", "fleet/../control/list-nodes")
    with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=verify) as client:
        for path in (*refused, "fleet/%2e%2e/control/list-nodes", "fleet/..%2fcontrol/list-nodes", ""):
            request = client.build_request("POST", "/v1/fleet/x")
            request.url = request.url.copy_with(raw_path=f"/v1/{path}".encode())
            assert client.send(request).status_code == 403, path
        assert client.post("/v1/fleet/push-object", content=b"x" * (17 << 20)).status_code == 413
        assert client.post("/v1/fleet/pull-messages").status_code in (400, 401, 403, 412, 415), "Flower's own refusal"
    assert len(deployment.nodes()) >= 3, "without the proxy anybody may ask"


def test_strangers_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    """A key that was not registered; and a SuperLink that shows a certificate of another authority."""
    other = tmp_path / "keys"
    make_keys(other, [], 1, days=2)
    before = {(node["node-id"], node["status"]) for node in deployment.nodes()}
    stranger = deployment.supernode(0, name="stranger", key=other / "node0")
    misled = deployment.supernode(0, name="misled", ca=other / "ca.crt")
    wait("the stranger to give up", lambda: stranger.process.poll() is not None, 60)
    wait("the misled to give up", lambda: misled.process.poll() is not None, 90)
    assert stranger.process.returncode != 0, stranger.said()
    assert misled.process.returncode != 0, misled.said()
    assert "CERTIFICATE_VERIFY_FAILED" in misled.said() or "certificate" in misled.said().lower()
    assert {(node["node-id"], node["status"]) for node in deployment.nodes()} == before


def serverapp(deployment: Deployment) -> int | None:
    """The process of the ServerApp, which the SuperLink started."""
    found = members(deployment.machines["superlink"].home)
    return next((process for process, command in found.items() if "flwr-serverapp" in command), None)


def test_a_node_and_the_server_die_and_come_back(deployment: Deployment, tmp_path: Path) -> None:
    settings = {"algorithm": "fedlesam-s", "minimum": 2, "folder": str(tmp_path), **PATIENT}
    deployment.run(**settings, rounds=1000)
    wait("the first round", lambda: index(tmp_path)["round"] >= 1)
    deployment.machines["node2"].end(signal.SIGKILL)
    # Flower itself answers for a node that has not been heard of for a minute
    wait("a round without it", lambda: any("2" in r["dropped"] for r in index(tmp_path)["rounds"]))
    deployment.restart(2)
    wait("a round with it again", lambda: any(r["lost"] == [2] for r in index(tmp_path)["rounds"]))
    process = wait("the ServerApp", lambda: serverapp(deployment))
    # not while it sends: for the rest of half a message Flower's nodes wait a minute
    time.sleep(6)
    os.kill(process, signal.SIGKILL)
    wait("its end", lambda: serverapp(deployment) != process, 60)
    stopped = index(tmp_path)
    rounds = stopped["round"] + 1
    deployment.finish(deployment.run(**settings, rounds=rounds))
    found = index(tmp_path)
    assert found["rounds"][: stopped["round"]] == stopped["rounds"], "it went on from its checkpoint"
    assert [r["round"] for r in found["rounds"]] == [*range(rounds)]
    lost = [r["lost"] for r in found["rounds"][stopped["round"] :]]
    assert all(clients in ([], [2]) for clients in lost), "nodes 0 and 1 have their memory in files"
    assert lost[0] == [2], "for Flower it is another run, and node 2 keeps its memory in the run's state only"
    kept = [own_c(deployment, found, client) for client in (0, 1)]
    kept.append(load_file(tmp_path / found["clients"]["2"]["file"])["correction/change"])
    c = load_file(tmp_path / found["state"]["file"])["correction/c"]
    assert c.norm() > 0.01
    torch.testing.assert_close(c, torch.stack(kept).mean(0), atol=1e-5, rtol=1e-4)


def own_c(deployment: Deployment, found: dict[str, Any], client: int) -> torch.Tensor:
    """The c_i of a node that keeps its memory in files, as it lies there."""
    name = f"client{client:06d}-{found['used'][str(client)]}.safetensors"
    return load_file(deployment.folder / "memory" / name)["correction/c"]


def test_nothing_is_installed_and_nobody_is_told(deployment: Deployment) -> None:
    """Last: all processes above ran so."""
    for name, machine in deployment.machines.items():
        said = machine.said()
        assert "Installing app dependencies" not in said, name
        assert "uv sync" not in said, name
    for process in members(deployment.machines["superlink"].home):
        told = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        assert b"FLWR_TELEMETRY_ENABLED=0" in told

"""The server stops and goes on from its checkpoint, with the nodes still up."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.serverapp.strategy import Strategy as FlowerStrategy
from safetensors.torch import load, save
from scenes import (
    TIMEOUT,
    assert_same_memories,
    assert_same_state,
    assert_sums_hold,
    model,
    scene,
    simulation,
)

from fedlesam.core import disk
from fedlesam.flower import Strategy

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("name", ["fedadam", "fedcm", "fedsmoo", "fedlesam-s", "fedlesam-d"])
def test_going_on_is_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    """Nodes with memory in files; for Flower the second part is another run, with an empty Context.state."""
    strategy, grid = scene(name, memory=tmp_path / "nodes", active=4, folder=tmp_path / "server")
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    grid.new_run()
    again, _ = scene(name, active=4, folder=tmp_path / "server")
    assert again.state.round == 3
    assert again.rounds == strategy.rounds
    again.start(grid, num_rounds=6, timeout=TIMEOUT)
    fed = simulation(name, active=4)
    list(fed.run(6))
    assert_same_state(again, fed)
    assert_same_memories(again, grid, fed)
    assert [record.round for record in again.rounds] == [*range(6)]
    assert not any(record.lost for record in again.rounds)


def test_a_server_that_dies_in_a_round(tmp_path: Path) -> None:
    """The nodes have trained and hold pending memories; the server had not written the round yet."""
    strategy, grid = scene("scaffold", memory=tmp_path / "nodes", folder=tmp_path / "server")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    grid.push_messages(strategy.configure_train(3, strategy.arrays, {}, grid))
    del strategy  # and with it its lock, as with a process
    grid.new_run()
    again, _ = scene("scaffold", folder=tmp_path / "server")
    again.start(grid, num_rounds=4, timeout=TIMEOUT)
    fed = simulation("scaffold")
    list(fed.run(4))
    assert_same_state(again, fed)
    assert_same_memories(again, grid, fed)


@pytest.mark.parametrize("name", ["fedlesam-s", "feddyn"])
def test_without_files_on_the_nodes_the_sums_stay_true(name: str, tmp_path: Path) -> None:
    strategy, grid = scene(name, folder=tmp_path)
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    grid.new_run()
    again, _ = scene(name, folder=tmp_path)
    again.start(grid, num_rounds=4, timeout=TIMEOUT)
    assert again.rounds[-1].lost == [*range(6)]
    assert_sums_hold(again, grid)
    again.start(grid, num_rounds=5, timeout=TIMEOUT)
    assert again.rounds[-1].lost == []
    assert_sums_hold(again, grid)


def test_a_finished_run_only_says_so(tmp_path: Path) -> None:
    strategy, grid = scene("fedavg", folder=tmp_path)
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    again, _ = scene("fedavg", folder=tmp_path)
    trained = len(grid.of(0).replied)
    result = again.start(grid, num_rounds=2, timeout=TIMEOUT)
    assert len(grid.of(0).replied) == trained
    loaded = model()
    loaded.load_state_dict(result.arrays.to_torch_state_dict())
    assert torch.equal(torch.nn.utils.parameters_to_vector(loaded.parameters()), strategy.state.weights)


@pytest.mark.parametrize("fails_at", range(8))
def test_a_crash_while_writing_leaves_the_round_before(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the eight files of a round: six clients' sums, the state, the index."""
    strategy, grid = scene("scaffold", memory=tmp_path / "nodes", folder=tmp_path / "server")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    state, used = strategy.state, dict(strategy.used)
    real, written = disk.write_bytes, []

    def write(path: Path, content: bytes) -> None:
        ours = path.parent.name == "server"
        written.extend([path.name] if ours else [])
        if ours and len(written) > fails_at:
            path.with_name(path.name + ".part").write_bytes(content[: len(content) // 2])
            raise OSError("no space left on device")
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_bytes", write)
        with pytest.raises(OSError, match="no space"):
            strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    assert strategy.state is state
    assert strategy.used == used
    grid.new_run()
    again, _ = scene("scaffold", folder=tmp_path / "server")
    again.start(grid, num_rounds=4, timeout=TIMEOUT)
    fed = simulation("scaffold")
    list(fed.run(4))
    assert_same_state(again, fed)
    assert not list((tmp_path / "server").glob("*.part"))


def test_the_folder_does_not_grow(tmp_path: Path) -> None:
    strategy, grid = scene("fedsmoo", folder=tmp_path)
    counts = set()
    for rounds in range(1, 5):
        strategy.start(grid, num_rounds=rounds, timeout=TIMEOUT)
        counts.add(len(list(tmp_path.iterdir())))
    assert counts == {1 + 1 + 6 + 1}, "the index, the state, the sums of six clients, the lock"


@pytest.mark.parametrize(
    "settings",
    [{"seed": 8}, {"active": 3}, {"hyper": {"rho": 0.5}}, {"clients": 7}],
    ids=lambda settings: next(iter(settings)),
)
def test_another_run_is_refused(settings: dict[str, object], tmp_path: Path) -> None:
    strategy, grid = scene("fedlesam-s", folder=tmp_path)
    strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
    values = {"clients": 6, "seed": 7, "folder": tmp_path, **settings}
    with pytest.raises(ValueError, match="holds another run"):
        Strategy(model(), "fedlesam-s", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["checkpoint.json", "state-*", "client000003-*"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_not_believed(pattern: str, damage: str, tmp_path: Path) -> None:
    strategy, grid = scene("feddyn", folder=tmp_path)
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    (file,) = tmp_path.glob(pattern)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        if pattern == "checkpoint.json":
            pytest.skip("without its index a folder holds no checkpoint")
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises(ValueError, match=file.name[:6]):
        again, _ = scene("feddyn", folder=tmp_path)
        again.start(grid, num_rounds=3, timeout=TIMEOUT)


def test_the_index_is_plain_json(tmp_path: Path) -> None:
    strategy, grid = scene("fedlesam-s", folder=tmp_path)
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    index = json.loads((tmp_path / "checkpoint.json").read_text())["checkpoint"]
    assert index["round"] == 2
    assert len(index["rounds"]) == 2
    assert index["metadata"]["algorithm"] == repr(strategy.algorithm)


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its tensors were called slot.name, and its settings `about`."""
    strategy, grid = scene("scaffold", memory=tmp_path / "nodes", folder=tmp_path / "server")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    grid.new_run()
    path = tmp_path / "server" / "checkpoint.json"
    index = json.loads(path.read_text())["checkpoint"]
    index["about"] = index.pop("metadata")
    for entry in (index["state"], *index["clients"].values()):
        file = tmp_path / "server" / entry["file"]
        entry["sha256"] = renamed(file)
    for file in (tmp_path / "nodes").glob("*.safetensors"):
        renamed(file)
    body = json.dumps(index, sort_keys=True)
    path.write_text(json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "checkpoint": index}))
    again, _ = scene("scaffold", folder=tmp_path / "server")
    again.start(grid, num_rounds=4, timeout=TIMEOUT)
    assert not any(record.lost for record in again.rounds)
    fed = simulation("scaffold")
    list(fed.run(4))
    assert_same_state(again, fed)
    assert_same_memories(again, grid, fed)


def renamed(file: Path) -> str:
    """A file with the names of earlier versions; its checksum."""
    content = save({name.replace("/", ".", 1): tensor for name, tensor in load(file.read_bytes()).items()})
    file.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """The second is refused with the holder's name, and later resumes from what the first has written."""
    first, grid = scene("fedlesam-s", folder=tmp_path)
    second, other_grid = scene("fedlesam-s", folder=tmp_path)
    refused = []

    def meanwhile(rounds: int, arrays: Any) -> None:
        if rounds != 1:
            return
        for start in (Strategy.start, FlowerStrategy.start):
            with pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .*another folder"):
                start(second, other_grid, second.arrays, num_rounds=5, timeout=TIMEOUT)
            refused.append(start)

    first.start(grid, num_rounds=2, timeout=TIMEOUT, evaluate_fn=meanwhile)
    assert len(refused) == 2
    second.start(grid, num_rounds=3, timeout=TIMEOUT)
    fed = simulation("fedlesam-s")
    list(fed.run(3))
    assert_same_state(second, fed)
    assert [done.round for done in second.rounds] == [0, 1, 2]

"""A node dies and comes back: its client counts as never active, and the server's sums stay true."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.app import Message, RecordDict
from scenes import (
    CLIENTS,
    TIMEOUT,
    assert_same_memories,
    assert_same_state,
    assert_sums_hold,
    counted,
    scene,
    simulation,
)

from fedlesam.algorithms import CATALOGUE, example
from fedlesam.flower import Strategy, records
from fedlesam.flower.client_sums import summing_slots

pytestmark = pytest.mark.extras

SUMMING = ["scaffold", "fedgamma", "fedlesam-s", "freesam-s", "feddyn", "fedsmoo", "fedlesam-d", "freesam-d"]
SUMMING += ["fedlesam-released-s", "fedlesam-released-d", "shuffled-s", "scaffold-damped"]
SUMMING += ["fedgloss", "fedgmt", "fedwmsam", "fedspeed-released", "fedsmoo-released"]


def test_which_methods_have_sums_over_clients() -> None:
    assert sorted(name for name in CATALOGUE if summing_slots(example(name))) == sorted(SUMMING)


@pytest.mark.parametrize("name", SUMMING)
def test_the_sums_stay_true(name: str) -> None:
    """Client 2 loses its memory twice, client 4 once; in between all train on."""
    strategy, grid = scene(name)
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    for gone in ([2], [2, 4], []):
        for client in gone:
            grid.of(client).context.state = RecordDict()
        strategy.start(grid, num_rounds=strategy.state.round + 1, timeout=TIMEOUT)
        assert strategy.rounds[-1].lost == gone
        assert_sums_hold(strategy, grid)
    assert strategy.state.round == 5


def test_without_forgetting_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr("fedlesam.flower.strategy.remove_clients", lambda state, *_: state)
    strategy, grid = scene("scaffold")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    grid.of(2).context.state = RecordDict()
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    with pytest.raises(AssertionError):
        assert_sums_hold(strategy, grid)


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_it_is_as_if_the_client_had_never_been_active(name: str) -> None:
    """All clients lose all memory: what is left is the model, as in a new federation that starts from it."""
    strategy, grid = scene(name)
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    from fedlesam.flower.client_sums import remove_clients

    bare = remove_clients(strategy.state, strategy.algorithm, strategy.sums, range(CLIENTS), CLIENTS)
    for slot in ("correction", "server"):
        for value in getattr(bare, slot).values():
            assert value.abs().max() < 1e-6
    assert torch.equal(bare.weights, strategy.state.weights)


def too_large(reply: Message) -> Message:
    """A good answer to look at, which the sums refuse."""
    record = reply.content.array_records[records.ARRAYS]
    record["update"] = records.array(records.tensor(record["update"]) * 1e30)
    return reply


@pytest.mark.parametrize("fate", [lambda reply: None, too_large], ids=["lost", "refused"])
def test_a_lost_memory_is_forgotten_once(fate: Any) -> None:
    """The answer that says so is itself not used: nothing is forgotten until one is."""
    strategy, grid = scene("scaffold")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    grid.of(3).context.state = RecordDict()
    grid.meddle = {3: fate}
    strategy.start(grid, num_rounds=4, timeout=TIMEOUT)
    assert not any(record.lost for record in strategy.rounds)
    grid.meddle = {}
    strategy.start(grid, num_rounds=5, timeout=TIMEOUT)
    assert strategy.rounds[-1].lost == [3]
    assert_sums_hold(strategy, grid)
    strategy.start(grid, num_rounds=6, timeout=TIMEOUT)
    assert strategy.rounds[-1].lost == []
    assert_sums_hold(strategy, grid)


def leave_and_return(strategy: Strategy, grid: object, client: int, node: int) -> None:
    from local_grid import LocalGrid

    assert isinstance(grid, LocalGrid)
    grid.leave(client)
    strategy.start(grid, num_rounds=strategy.state.round + 1, timeout=TIMEOUT)
    assert strategy.rounds[-1].dropped == {client: "its SuperNode is not connected"}
    grid.join(node, client)
    strategy.start(grid, num_rounds=strategy.state.round + 2, timeout=TIMEOUT)


def test_a_node_that_returns_as_another() -> None:
    """Flower may give it a new id. The run goes on without it, then with it."""
    strategy, grid = scene("fedlesam-s")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    leave_and_return(strategy, grid, client=5, node=77)
    assert strategy.nodes.of[5] == 77
    assert [record.lost for record in strategy.rounds] == [[], [], [], [5], []]
    assert_sums_hold(strategy, grid)


def test_a_memory_in_files_is_not_lost(tmp_path: Path) -> None:
    """Then the node goes on where it was, and all is as in the simulation."""
    strategy, grid = scene("fedsmoo", memory=tmp_path / "memory")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    leave_and_return(strategy, grid, client=5, node=77)
    fed = simulation("fedsmoo")
    for active in ([*range(6)], [*range(6)], [*range(5)], [*range(6)], [*range(6)]):
        fed.round(active)
    assert not any(record.lost for record in strategy.rounds)
    assert_same_state(strategy, fed)
    assert_same_memories(strategy, grid, fed)
    files = sorted(path.name for path in (tmp_path / "memory").iterdir())
    assert len(files) == 2 * CLIENTS, "the one that counts and the pending one"
    assert not any(name.endswith(".part") for name in files)


def test_a_damaged_memory_is_a_lost_one(tmp_path: Path) -> None:
    strategy, grid = scene("scaffold", memory=tmp_path)
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    grid.of(1).context.state = RecordDict()
    for file in tmp_path.glob("client000001-*"):
        file.write_bytes(file.read_bytes()[:50])
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    assert strategy.rounds[-1].lost == [1]
    strategy.start(grid, num_rounds=4, timeout=TIMEOUT)
    assert_sums_hold(strategy, grid)


def test_two_nodes_cannot_be_one_client() -> None:
    strategy, grid = scene("scaffold")
    grid.join(5, client=2)
    strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
    assert strategy.nodes.of[2] in (5, 1014)
    fed = simulation("scaffold")
    fed.round()
    assert_same_state(strategy, fed)


@pytest.mark.parametrize("number", [-1, 6, "two", True, None])
def test_a_node_without_a_good_number_is_not_used(number: object) -> None:
    strategy, grid = scene("fedavg")
    grid.join(5, client=number)
    strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
    assert 5 not in strategy.nodes.of.values()
    assert strategy.rounds[0].active == [*range(6)]


def test_a_federation_begins_anew_with_nodes_that_remember_another() -> None:
    """`used` is empty then: what is in the node's state does not count."""
    strategy, grid = scene("fedlesam-s")
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    again, _ = scene("fedlesam-s")
    again.start(grid, num_rounds=2, timeout=TIMEOUT)
    assert torch.equal(strategy.state.weights, again.state.weights)
    assert not any(record.lost for record in again.rounds)
    assert counted(again, grid, 0).nbytes

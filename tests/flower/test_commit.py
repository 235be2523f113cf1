"""A node's memory counts only when the server has used the answer it was made with.

The oracle is the simulation: a client whose answer was not used was not active.
"""

import copy
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from local_grid import LocalGrid
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

from fedlesam.flower import Strategy, records
from fedlesam.flower.memory import PREFIX
from fedlesam.flower.nodes import LATE

pytestmark = pytest.mark.extras

METHODS = ["scaffold", "feddyn", "fedsmoo", "fedlesam", "fedlesam-s", "fedlesam-d"]
"""Those with memory, one for each kind and combination."""


def lose(reply: Message) -> None:
    """The reply never comes, or comes after the round was closed: the server does not look for it any more."""


def poison(reply: Message) -> Message:
    record = reply.content.array_records[records.ARRAYS]
    value = records.tensor(record["update"])
    value[0] = float("nan")
    record["update"] = records.array(value)
    return reply


FATES: dict[str, Callable[[Message], Message | None]] = {"lost": lose, "rejected": poison}


def one_round(strategy: Strategy, grid: LocalGrid, fates: dict[int, str]) -> list[int]:
    """A round in which these clients' answers are not used; who is left."""
    grid.meddle = {client: FATES[fate] for client, fate in fates.items()}
    strategy.start(grid, num_rounds=strategy.state.round + 1, timeout=TIMEOUT)
    grid.meddle = {}
    assert sorted(strategy.rounds[-1].dropped) == sorted(set(fates) & set(strategy.rounds[-1].active))
    return [client for client in strategy.rounds[-1].active if client not in fates]


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("name", METHODS)
def test_an_answer_that_was_not_used(name: str, fate: str) -> None:
    """Client 1's are not used in rounds 1 and 2, client 0's in round 2; afterwards all is well."""
    strategy, grid = scene(name)
    fed = simulation(name)
    for fates in ({}, {1: fate}, {0: fate, 1: fate}, {}, {3: fate}, {}):
        fed.round(one_round(strategy, grid, fates))
        assert_same_state(strategy, fed)
        assert_same_memories(strategy, grid, fed)
        assert_sums_hold(strategy, grid)
    assert not any(record.lost for record in strategy.rounds)


@settings(max_examples=12)
@given(
    name=st.sampled_from(METHODS),
    schedule=st.lists(
        st.dictionaries(st.integers(0, CLIENTS - 1), st.sampled_from(sorted(FATES)), max_size=3), min_size=2, max_size=5
    ),
)
def test_any_schedule_of_misfortune(name: str, schedule: list[dict[int, str]]) -> None:
    strategy, grid = scene(name)
    fed = simulation(name)
    for fates in schedule:
        fed.round(one_round(strategy, grid, fates))
    assert_same_state(strategy, fed)
    assert_same_memories(strategy, grid, fed)
    assert_sums_hold(strategy, grid)


def test_late_replies_are_not_used_in_the_next_round() -> None:
    """The reply of round 1 turns up beside that of round 2."""
    strategy, grid = scene("scaffold")
    fed = simulation("scaffold")
    fed.round(one_round(strategy, grid, {}))
    late: list[Message] = []
    grid.meddle = {2: lambda reply: late.append(reply)}  # type: ignore[func-returns-value]
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    fed.round([0, 1, 3, 4, 5])
    grid.meddle = {}
    messages = list(strategy.configure_train(3, strategy.arrays, {}, grid))
    on_time = list(grid.send_and_receive(messages))
    replies = [*late, *on_time, *(poison(copy.deepcopy(reply)) for reply in on_time)]
    arrays, _ = strategy.aggregate_train(3, replies)
    assert arrays is not None
    fed.round()
    assert strategy.rounds[1].dropped == {2: LATE}
    assert strategy.rounds[2].dropped == {}, "a second reply to the same message changes nothing"
    assert_same_state(strategy, fed)
    assert_sums_hold(strategy, grid)


def test_a_round_that_is_tried_again() -> None:
    """Too few answers: nothing changes, and the next attempt is the same round from the same memories."""
    strategy, grid = scene("fedlesam-s", minimum=1.0)
    fed = simulation("fedlesam-s")
    fed.round(one_round(strategy, grid, {}))
    before, used = strategy.state, dict(strategy.used)
    misfortunes = iter([None, None])

    def twice(reply: Message) -> Message | None:
        return next(misfortunes, reply)

    grid.meddle = {4: twice}
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    assert strategy.state is not before
    assert used != strategy.used
    assert len(grid.of(0).replied) == 1 + 1 + 3, "the query, round 0 and three attempts at round 1"
    fed.round()
    assert_same_state(strategy, fed)
    assert_same_memories(strategy, grid, fed)


def test_a_round_that_never_works_says_so_and_changes_nothing() -> None:
    strategy, grid = scene("feddyn", minimum=6, attempts=2)
    one_round(strategy, grid, {})
    before, used = strategy.state, dict(strategy.used)
    grid.meddle = {0: lose}
    with pytest.raises(RuntimeError, match=r"round 1: fewer than 6 answers that could be used, 2 times in a row"):
        strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    assert strategy.state is before
    assert strategy.used == used
    assert len(strategy.rounds) == 1


def test_a_node_keeps_two_memories_at_most() -> None:
    strategy, grid = scene("fedlesam-s")
    for fates in ({}, {}, {0: "lost"}, {0: "lost"}, {0: "rejected"}, {}):
        one_round(strategy, grid, fates)
        for client in range(CLIENTS):
            kept = [key for key in grid.of(client).context.state if key.startswith(PREFIX)]
            assert len(kept) <= 2
            assert PREFIX + strategy.used[client] in kept


def test_the_same_message_twice_gives_the_same_answer() -> None:
    """Flower may deliver again: training starts from the memory that counts, not from the pending one."""
    strategy, grid = scene("fedsmoo")
    one_round(strategy, grid, {})
    (message, *_) = strategy.configure_train(2, strategy.arrays, {}, grid)
    message.metadata.__dict__["_message_id"] = "m"
    node = grid.of(0)
    one, other = (records.tensors(node.handle(message).content.array_records[records.ARRAYS]) for _ in range(2))
    for key in one:
        assert torch.equal(one[key], other[key])
    assert counted(strategy, grid, 0).nbytes


def test_nothing_of_the_memory_is_sent() -> None:
    """FedLESAM's answer is its update: the bytes of one vector, whatever it keeps."""
    strategy, grid = scene("fedlesam-d")
    for _ in range(3):
        one_round(strategy, grid, {})
    w = strategy.state.weights
    for client in range(CLIENTS):
        assert counted(strategy, grid, client).nbytes == 2 * w.nbytes
        for reply in grid.of(client).replied[1:]:
            assert records.payload(reply.content) == w.nbytes
            assert list(reply.content.array_records) == [records.ARRAYS]
            assert list(reply.content.array_records[records.ARRAYS]) == ["update"]

"""What is wrong with an answer leaves its client out of the round, is reported, and touches nothing else."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from scenes import TIMEOUT, assert_same_memories, assert_same_state, assert_sums_hold, scene, simulation

from fedlesam.flower import records
from fedlesam.flower.nodes import LATE

pytestmark = pytest.mark.extras

Change = Callable[[Message], Message | None]


def arrays(change: Callable[[Any], None]) -> Change:
    def meddle(reply: Message) -> Message:
        change(reply.content.array_records[records.ARRAYS])
        return reply

    return meddle


def entry(name: str, value: float) -> Change:
    def change(record: Any) -> None:
        vector = records.tensor(record[name])
        vector[3] = value
        record[name] = records.array(vector)

    return arrays(change)


def put(name: str, array: Array) -> Change:
    return arrays(lambda record: record.__setitem__(name, array))


def metric(name: str, value: Any) -> Change:
    def meddle(reply: Message) -> Message:
        reply.content.metric_records[records.METRICS][name] = value
        return reply

    return meddle


def content(make: Callable[[Message], RecordDict]) -> Change:
    def meddle(reply: Message) -> Message:
        reply.content = make(reply)
        return reply

    return meddle


ENTRIES = 39
WRONG: dict[str, tuple[Change, str]] = {
    "nan": (entry("update", float("nan")), "update is not finite"),
    "infinite": (entry("correction/change", float("inf")), "correction/change is not finite"),
    "huge": (entry("correction/change", 1e30), "too large"),
    "short": (put("update", records.array(torch.zeros(3))), r"update is \(3,\)"),
    "matrix": (put("update", records.array(torch.zeros(3, 13))), r"update is \(3, 13\)"),
    "double": (put("update", records.array(torch.zeros(ENTRIES, dtype=torch.float64))), "torch.float64"),
    "lying-shape": (put("update", Array("float32", (ENTRIES,), records.RAW, b"123")), "3 bytes are not"),
    "pickle": (put("update", Array("float32", (ENTRIES,), "pickle", b"cos\nsystem\n")), "serialisation 'pickle'"),
    "one-too-many": (put("memory.c", records.array(torch.zeros(ENTRIES))), "expected"),
    "one-too-few": (arrays(lambda record: record.pop("correction/change")), "expected"),
    "no-arrays": (content(lambda r: RecordDict({"metrics": r.content["metrics"]})), "'arrays' is missing"),
    "no-metrics": (content(lambda r: RecordDict({"arrays": r.content["arrays"]})), "'metrics' is missing"),
    "other-kind": (content(lambda r: RecordDict({"arrays": ConfigRecord()})), "'arrays' is missing"),
    "empty": (content(lambda r: RecordDict({"arrays": ArrayRecord(), "metrics": r.content["metrics"]})), "expected"),
    "no-steps": (metric("steps", 0), "numbers are impossible"),
    "negative-examples": (metric("num-examples", -5), "numbers are impossible"),
    "text-steps": (metric("steps", [1, 2]), "'steps' must be int"),
    "nan-loss": (metric("loss", float("nan")), "its loss nan"),
    "no-lr": (metric("lr", 0.0), "learning rate 0.0"),
    "other-lr": (metric("lr", 17.0), "its learning rate is 17.0, that of the others"),
    "other-client": (metric("client", 3), "it claims to be from client 3"),
    "error": (lambda r: Message(Error(2, "no disk"), reply_to=asked(r)), "no disk"),
    "error-without-a-word": (lambda r: Message(Error(0), reply_to=asked(r)), "None"),
    "nothing": (lambda r: None, LATE),
}


def asked(reply: Message) -> Message:
    """A message to which `reply` was one."""
    back = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
    back.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return back


@pytest.mark.parametrize("name", WRONG)
def test_left_out_and_reported(name: str) -> None:
    change, says = WRONG[name]
    strategy, grid = scene("fedlesam-s")
    fed = simulation("fedlesam-s")
    assert strategy.state.weights.numel() == ENTRIES
    strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
    grid.meddle = {1: change}
    result = strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    grid.meddle = {}
    record = strategy.rounds[-1]
    assert list(record.dropped) == [1]
    assert re.search(says, record.dropped[1]), record.dropped
    assert result.train_metrics_clientapp[2]["dropped"] == 1
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    for active in ([*range(6)], [0, 2, 3, 4, 5], [*range(6)]):
        fed.round(active)
    assert_same_state(strategy, fed)
    assert_same_memories(strategy, grid, fed)
    assert_sums_hold(strategy, grid)
    assert record.bytes_up == strategy.rounds[0].bytes_up * 5 // 6, "what was not used is not counted"


def test_it_is_in_the_log() -> None:
    import logging

    strategy, grid = scene("fedavg")
    grid.meddle = {1: WRONG["nan"][0]}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    try:
        strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    assert "round 0: client 1 is dropped: update is not finite" in said


def test_an_answer_that_cannot_even_be_read() -> None:
    """Flower's own reader fails: only that client is dropped."""
    strategy, grid = scene("scaffold")
    fed = simulation("scaffold")
    read = grid.pull_messages

    def pull(message_ids: Any) -> Any:
        found = list(read(message_ids))
        if any(m.metadata.src_node_id == 1014 and m.metadata.message_type == "train" for m in found):
            raise KeyError("object tree")
        return found

    grid.pull_messages = pull  # type: ignore[method-assign]
    strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    assert "cannot be read" in strategy.rounds[0].dropped[2]
    for _ in range(2):
        fed.round([0, 1, 3, 4, 5])
    assert_same_state(strategy, fed)


def test_a_client_that_diverges_says_so() -> None:
    """NotFinite at the client: no answer but the reason, and its memory is as it was."""
    strategy, grid = scene("fedlesam-s")
    (message, *_) = strategy.configure_train(1, strategy.arrays, {}, grid)
    message.metadata.__dict__["_message_id"] = "m"
    weights = torch.full_like(strategy.state.weights, 1e38)
    message.content.array_records[records.ARRAYS]["weights"] = records.array(weights)
    before = dict(grid.of(0).context.state)
    reply = grid.of(0).handle(message)
    assert "round 0, client 0" in str(reply.error.reason)
    assert "not finite" in str(reply.error.reason)
    assert dict(grid.of(0).context.state) == before


@pytest.mark.parametrize("bad", [[0, 1, 2], [3], [0, 5]])
def test_the_minimum_is_of_good_answers(bad: list[int]) -> None:
    strategy, grid = scene("fedavg", minimum=4, attempts=1)
    grid.meddle = dict.fromkeys(bad, WRONG["nan"][0])
    if len(bad) > 2:
        with pytest.raises(RuntimeError, match="fewer than 4"):
            strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
        assert strategy.state.round == 0
    else:
        strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
        assert strategy.state.round == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clients": 0}, "clients must be a whole number from 1"),
        ({"active": 7}, "active must be from 1 to"),
        ({"minimum": 0}, "active must be from 1"),
        ({"algorithm": "fedfoo"}, "unknown algorithm"),
        ({"hyper": {"nu": 1}}, "has no nu"),
        ({"answer": "gradient"}, "answer must be one of"),
        ({"patience": -1}, "patience must be at least 0"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], says: str) -> None:
    from scenes import model

    from fedlesam.flower import Strategy

    with pytest.raises(ValueError, match=says):
        Strategy(model(), **{"algorithm": "fedavg", "clients": 6, **settings})

"""Very many clients: made and checked when they are drawn, with the sentences of the check before the first round."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import SCHEDULE, Listed, assert_same_bits, federate, federation, play, samples, states, training

from fedlesam.core import drawn
from fedlesam.core.batches import ClientData


class Made(Sequence[ClientData]):
    """Clients that are made when they are asked for; those that were are noted."""

    def __init__(self, count: int, change: dict[int, Any] | None = None) -> None:
        self.count, self.change, self.made = count, change or {}, list[int]()
        self.some = samples()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, client: Any) -> Any:
        self.made.append(client)
        changed = self.change.get(client)
        if isinstance(changed, Exception):
            raise changed
        return self.some[client % len(self.some)] if changed is None else changed


def test_a_million_clients_are_not_looked_at() -> None:
    clients = Made(1_000_000)
    fed = federation("fedlesam-s", clients=clients, active=5)
    assert clients.made == [0]
    assert "1000000 clients" in repr(fed)
    for _ in range(2):
        clients.made.clear()
        record = fed.round()
        assert clients.made == record.active
        assert len(record.active) == 5
    assert len(fed.memories) == 10


@pytest.mark.parametrize("more", [{}, {"workers": 2}, {"engine": "stacked"}, {"weighting": "examples"}], ids=str)
def test_the_bits_are_those_of_a_list(more: dict[str, Any]) -> None:
    name = "fedlesam" if "weighting" in more else "fedlesam-s"
    with federation(name, **more) as plain:
        expected = states(play(plain, SCHEDULE[:3]))
    with federation(name, clients=Made(6), **more) as made:
        assert_same_bits(expected, states(play(made, SCHEDULE[:3])))


class Unread(Listed):
    """A client whose samples cannot be counted."""

    def __len__(self) -> int:
        raise OSError("it was looked at")


def test_a_longer_list_is_not_looked_at_whole() -> None:
    """Ten thousand clients are; of one more, the others are looked at when they are drawn."""
    x, y = samples()[0]
    some: list[ClientData] = [(x, y)] * 10_000
    with pytest.raises(OSError, match="it was looked at"):
        federation("fedavg", clients=[*some[:-1], Unread(x, y)])
    fed = federation("fedavg", clients=[*some, Unread(x, y)])
    fed.round([0, 9_999])
    with pytest.raises(OSError, match="it was looked at"):
        fed.round([10_000])


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


WRONG: dict[str, tuple[Any, str]] = {
    "label": ((ones(2, 5), torch.tensor([0, 3])), r"client 4: label 3 is outside 0 to 2, the model's 3 outputs"),
    "dtype": ((torch.ones(2, 5), torch.tensor([0, 1])), r"client 4: x is torch.float32, but torch"),
    "empty": ((ones(0, 5), torch.zeros(0).long()), r"client 4: has no samples; leave it out"),
    "lengths": ((ones(2, 5), torch.tensor([0])), r"client 4: x has 2 samples and y has 1"),
    "nan": ((ones(2, 5) * torch.nan, torch.tensor([0, 1])), r"client 4: x of sample 0 is not finite"),
    "targets": ((ones(2, 5), ones(2)), r"client 4: y is torch.float64, and the default loss"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("kind", ["list", "long list", "made"])
def test_a_client_that_cannot_be_used(what: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sentence, before the first round or when the client is drawn."""
    data, sentence = WRONG[what]
    if kind == "list":
        with pytest.raises(ValueError, match=sentence):
            federation("fedavg", clients=[*samples()[:4], data])
        return
    if kind == "long list":
        monkeypatch.setattr(drawn, "MOST", 4)
    fed = federation("fedavg", clients=Made(5, {4: data}) if kind == "made" else [*samples()[:4], data])
    play(fed, [(0, 1), (2, 3)])
    before = states(fed)
    with pytest.raises(ValueError, match=sentence):
        fed.round([1, 4])
    assert_same_bits(before, states(fed))


@pytest.mark.parametrize("weighting", ["clients", "examples"])
@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_it_is_dropped_where_clients_that_fail_are(weighting: str, engine: str) -> None:
    change = {3: WRONG["label"][0], 4: OSError("the disk of client 4 is gone")}
    fed = federation("fedlesam", clients=Made(6, change), on_client_error="drop", weighting=weighting, engine=engine)
    record = fed.round([0, 1, 3, 4])
    assert record.dropped == {
        3: "ValueError: client 3: label 3 is outside 0 to 2, the model's 3 outputs; mend the labels, or give the model "
        "an output for each class",
        4: "OSError: the disk of client 4 is gone",
    }
    assert list(fed.memories) == [0, 1]


def test_a_loss_of_ones_own_takes_any_targets() -> None:
    pairs = {i: (ones(4, 5), ones(4, 3)) for i in range(6)}
    local = training(loss=nn.functional.mse_loss)
    federation("fedavg", clients=Made(6, pairs), local=local).round([0, 5])


def test_what_needs_all_clients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"per_client needs the classes of all 6 clients, and a Made makes clients"):
        federation("fedavg", clients=Made(6), per_client=True, test=samples()[0])


def test_memory_grows_with_those_that_were_active() -> None:
    """Of the federation itself: whatever is kept for each client is kept for those that were drawn."""
    model = nn.Linear(5, 3).double()
    fed = federate(model, Made(1_000_000), "scaffold", training(epochs=1), active=3)
    for _ in range(3):
        fed.round()
    clients = fed._local_engine.clients
    assert isinstance(clients, drawn.DrawnClients)
    assert set(clients.sizes) == set(fed.memories) == {c for record in fed.history for c in record.active}
    assert fed.memories.nbytes == 9 * 18 * 8

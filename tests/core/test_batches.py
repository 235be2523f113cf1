"""The batches of a client."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from worlds import Listed, federation, samples, training

from fedlesam.core.batches import Batches, batch_indices, steps_per_epoch

CPU = torch.device("cpu")


def joined(lists: list[list[Any]]) -> list[Any]:
    return [item for part in lists for item in part]


def drawn(size: int, batch_size: int, epochs: int, join_last: bool = False, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    everyone = torch.arange(size)
    return [everyone[i].tolist() for i in batch_indices(size, batch_size, epochs, join_last, draw)]


@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 3), st.booleans())
def test_every_epoch_is_a_permutation(size: int, batch_size: int, epochs: int, join_last: bool) -> None:
    batches = drawn(size, batch_size, epochs, join_last)
    per_epoch = steps_per_epoch(size, batch_size, join_last)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(joined(mine)) == list(range(size))
        assert all(len(batch) == batch_size for batch in mine[:-1])


@given(st.integers(1, 60), st.integers(1, 65))
def test_steps_of_an_epoch(size: int, batch_size: int) -> None:
    """ceil(n / batch); with BatchNorm a last batch of one sample joins the one before."""
    expected = -(-size // batch_size)
    assert steps_per_epoch(size, batch_size, False) == expected
    assert steps_per_epoch(size, batch_size, True) == expected - (size > batch_size > 1 and size % batch_size == 1)
    if batch_size > 1 and size > 1:
        assert all(len(batch) > 1 for batch in drawn(size, batch_size, 1, True))


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    assert [len(b) for b in drawn(9, 4, 1, join_last=False)] == [4, 4, 1]
    assert [len(b) for b in drawn(9, 4, 1, join_last=True)] == [4, 5]
    assert [len(b) for b in drawn(10, 4, 1, join_last=True)] == [4, 4, 2]
    assert [len(b) for b in drawn(1, 4, 1, join_last=True)] == [1]


@pytest.mark.parametrize("batch_size", [6, 7, 100])
def test_a_full_batch_keeps_its_order(batch_size: int) -> None:
    assert drawn(6, batch_size, 3) == [list(range(6))] * 3


def test_the_order_is_fresh_in_every_epoch_and_for_every_seed() -> None:
    one = drawn(30, 30 // 2, 2)
    assert one[:2] != one[2:]
    assert one == drawn(30, 30 // 2, 2)
    assert one != drawn(30, 30 // 2, 2, seed=1)
    assert joined(one[:2]) != list(range(30))


def test_order_depends_on_round_and_client() -> None:
    """Two clients with the same samples, and one client in two rounds, see different orders."""
    seen: list[list[float]] = []

    def watch(x: Tensor, draw: torch.Generator) -> Tensor:
        seen.append(x[:, 0].tolist())
        return x

    client = samples((12,))[0]
    fed = federation("fedavg", clients=[client, client], local=training(epochs=1, batch_size=6, augment=watch))
    fed.round([0, 1])
    fed.round([0, 1])
    orders = [joined(seen[k : k + 2]) for k in range(0, 8, 2)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_augment_gets_a_whole_batch_and_a_generator() -> None:
    calls: list[tuple[tuple[int, ...], torch.Generator]] = []

    def noise(x: Tensor, draw: torch.Generator) -> Tensor:
        calls.append((tuple(x.shape), draw))
        return x + 0.1 * torch.randn(x.shape, generator=draw, dtype=x.dtype)

    local = training(epochs=2, batch_size=4, augment=noise)
    one = federation("fedsam", local=local)
    one.round([0])
    assert [shape for shape, _ in calls] == [(4, 5), (3, 5)] * 2
    assert all(isinstance(draw, torch.Generator) for _, draw in calls)
    other = federation("fedsam", local=local)
    other.round([0])
    assert torch.equal(one.weights, other.weights)
    plain = federation("fedsam", local=training(epochs=2, batch_size=4))
    plain.round([0])
    assert not torch.allclose(one.weights, plain.weights)


@pytest.mark.parametrize("wrap", [TensorDataset, Listed])
def test_fetch_of_a_data_set(wrap: type[Dataset[tuple[Tensor, Tensor]]]) -> None:
    x, y = samples((7,))[0]
    batches = Batches(wrap(x, y), CPU)
    assert len(batches) == 7
    for indices in (torch.tensor([5, 0, 3]), slice(None)):
        got_x, got_y = batches.fetch(indices, seed=0)
        assert torch.equal(got_x, x[indices])
        assert torch.equal(got_y, y[indices])


def test_a_loadable_client_is_loaded_when_it_trains() -> None:
    class Loaded:
        loads = 0

        def __len__(self) -> int:
            return 7

        def tensors(self) -> tuple[Tensor, Tensor]:
            Loaded.loads += 1
            return samples((7,))[0]

        def labels(self) -> Tensor:
            return samples((7,))[0][1]

    fed = federation("fedavg", clients=[Loaded()])
    loads = Loaded.loads
    fed.round([0])
    assert Loaded.loads == loads + 1
    plain = federation("fedavg", clients=samples((7,)))
    plain.round([0])
    assert torch.equal(fed.weights, plain.weights)


def test_batch_norm_trains_with_a_last_batch_of_one() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    fed = federation("fedavg", model=model, clients=samples((9,)), local=training(epochs=2, batch_size=4))
    record = fed.round()
    assert record.backward_passes == 4


class ChangesItsInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x.relu_())
        return outputs


@pytest.mark.parametrize("batch_size", [4, 100])
def test_a_model_that_changes_its_inputs_does_not_change_the_samples(batch_size: int) -> None:
    """Of a batch of all samples, of the test set, and of clients' own tests, too."""
    data, tests, [one] = samples(), samples((9,))[0], samples((3,))
    own = [None] * (len(data) - 1) + [one]
    before = [x.clone() for x, _ in (*data, tests, one)]
    local = training(batch_size=batch_size)
    fed = federation("fedsam", model=ChangesItsInputs(), clients=data, local=local, test=tests, test_clients=own)
    fed.round()
    assert all(torch.equal(x, same) for (x, _), same in zip((*data, tests, one), before, strict=True))

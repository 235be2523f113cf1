"""Passes in tf32 and bf16; what is moved, sent and summed stays in single precision."""

import pickle

import pytest
import torch
from replayed import TapeRecorder
from torch import Tensor, nn
from worlds import assert_same_bits, federation, mlp, play, samples, states, training

import fedlesam as fl
from fedlesam.core import seeds
from fedlesam.core.computing import compute_context
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.graphs import REHEARSALS, Graphs
from fedlesam.federation import Federation

CLIENTS = samples(dtype=torch.float32)


class Spy(nn.Module):
    """Tells in which types it was called."""

    seen: set[tuple[torch.dtype, torch.dtype]]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        Spy.seen.add((x.dtype, self.inner.weight.dtype))
        output: Tensor = self.inner(x)
        return output


def convolutional() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(layers, nn.Linear(12, 6), nn.LayerNorm(6), nn.Dropout(0.2), nn.Linear(6, 3))


def trained(precision: str, model: nn.Module | None = None, method: str = "fedsam", **settings: object) -> Federation:
    local = training(epochs=2, lr=0.05)
    module = mlp(dtype=torch.float32) if model is None else model
    fed = federation(method, model=module, clients=CLIENTS, local=local, precision=precision, **settings)
    return play(fed, [[0, 1], [1, 4]])


def test_passes_are_in_bf16_and_weights_are_not() -> None:
    Spy.seen = set()
    fed = trained("bf16-pure", Spy())
    assert Spy.seen == {(torch.bfloat16, torch.bfloat16)}
    assert {tensor.dtype for name, tensor in states(fed).items() if name != "round"} == {torch.float32}
    assert {p.dtype for p in fed.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam-s"])
def test_bf16_pure_is_near_fp32(method: str, engine: str) -> None:
    single, pure = (trained(name, None, method, engine=engine) for name in ("fp32", "bf16-pure"))
    moved = (single.weights - federation(method, dtype=torch.float32).weights).norm()
    away = (single.weights - pure.weights).norm()
    assert 1e-5 * moved < away < 0.05 * moved


def test_norm_layers_convolutions_and_dropout_in_bf16() -> None:
    fed = trained("bf16-pure", convolutional())
    assert fed.weights.isfinite().all()
    assert fed.state.buffers["0.2.running_mean"].dtype == torch.float32
    assert_same_bits(states(fed), states(trained("bf16-pure", convolutional())))


def test_a_step_below_the_last_digit_of_bf16_is_not_lost() -> None:
    fed = federation("fedavg", clients=CLIENTS, dtype=torch.float32, precision="bf16-pure", local=training(lr=1e-5))
    before = fed.weights
    fed.round([0, 1])
    assert (fed.weights != before).double().mean() > 0.9
    assert (fed.weights.bfloat16() != before.bfloat16()).double().mean() < 0.1


def test_a_buffer_that_would_mix_is_refused() -> None:
    model = mlp(dtype=torch.float32)
    model.register_buffer("scale", torch.ones(3))
    with pytest.raises(ValueError, match=r"bf16-pure: the buffer scale is in torch.float32.*use the precision bf16"):
        federation("fedavg", model=model, clients=CLIENTS, precision="bf16-pure")


@pytest.mark.parametrize("precision", ["tf32", "bf16", "bf16-pure"])
def test_another_process_has_the_same_precision(precision: str) -> None:
    there = pickle.loads(pickle.dumps(FlatModel(mlp(dtype=torch.float32), precision)))  # type: ignore[arg-type]
    assert there.precision == precision
    assert there.weights.dtype == torch.float32


def test_tf32_is_for_the_block_alone() -> None:
    device, before = torch.device("cpu"), torch.get_float32_matmul_precision()
    with compute_context(None, device, "tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(KeyError), compute_context(None, device, "tf32"):
        raise KeyError
    assert torch.get_float32_matmul_precision() == before
    with compute_context(None, device, "fp32"):
        assert torch.get_float32_matmul_precision() == before


def test_a_run_in_tf32_multiplies_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    forward = nn.Linear.forward

    def spied(self: nn.Linear, x: Tensor) -> Tensor:
        if self.training:
            seen.add(torch.get_float32_matmul_precision())
        return forward(self, x)

    fed = federation("fedavg", dtype=torch.float32, precision="tf32")
    monkeypatch.setattr(nn.Linear, "forward", spied)
    fed.round([0])
    assert seen == {"high"}


PASSES = 2 * 12
"""Passes of a round."""


@pytest.mark.parametrize(
    ("rate", "graphs", "seeded"),
    [
        (0.0, False, [1 + 1, 1 + 1]),
        (0.3, False, [1 + PASSES, 1 + PASSES]),
        (0.0, True, [1 + 2 * (REHEARSALS + 1), 1]),
        (0.3, True, [1 + PASSES, 1 + PASSES]),
    ],
)
def test_seeding_costs_nothing_where_no_layer_draws(
    rate: float, graphs: bool, seeded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once at the start of a client's round and once to see whether a layer draws; else before every pass.

    With graphs, both stretches of a step are seeded until they are recorded, and then only if they draw.
    """
    calls, reseed = [], seeds.reseed_torch

    def counted(seed: int, device: torch.device) -> None:
        calls.append(seed)
        reseed(seed, device)

    monkeypatch.setattr(seeds, "reseed_torch", counted)
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(rate), nn.Linear(4, 3)).double()
    fed = federation("fedsam", model=model, local=training(epochs=4))
    if graphs:
        fed._flat.graphs = Graphs(fed._flat.device, fed._flat.state, TapeRecorder)
    for expected in seeded:
        calls.clear()
        fed.round([1])
        assert len(calls) == expected


class Late(nn.Module):
    """Draws a mask only from its third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.drawn: list[tuple[float, float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) >= 2:
            mask = torch.rand(())
            self.drawn.append((float(x[0, 0]), float(mask)))
            x = x * mask
        found: torch.Tensor = self.linear(x)
        return found


def test_a_layer_that_draws_late_has_one_mask_in_both_passes() -> None:
    model, seen = Late(), []
    x = torch.arange(6.0)[:, None].repeat(1, 3)
    fed = fl.Federation(
        model, [(x, torch.zeros(6, dtype=torch.long))], "fedsam", fl.LocalTraining(batch_size=1, epochs=1)
    )
    fed._flat.module.drawn = seen  # type: ignore[assignment]
    fed.round()
    by_batch: dict[float, list[float]] = {}
    for batch, mask in seen:
        by_batch.setdefault(batch, []).append(mask)
    assert sorted(by_batch) == [2.0, 3.0, 4.0, 5.0]
    assert all(len(set(masks[-2:])) == 1 for masks in by_batch.values()), by_batch

"""The stacked engine against the plain one: the same numbers to rounding, for every method."""

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from worlds import PAPER, federate, slow_unless

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE, example
from fedlesam.core.batches import batch_indices
from fedlesam.engines import stacked as stacked_engine
from fedlesam.engines._feed import orders_of
from fedlesam.federation import Federation


def clients(dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of three sizes, so that there are stacks and a client alone."""
    draw = torch.Generator().manual_seed(3)
    sizes = (12, 12, 12, 9, 9, 5)
    return [(torch.randn(n, 6, generator=draw, dtype=dtype), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    net[0].bias.requires_grad_(False)
    return net


def pair(method: str, **local: Any) -> tuple[Federation, Federation]:
    settings = fl.LocalTraining(lr=0.2, epochs=range(1, 3), batch_size=5, **local)
    engines = ("plain", "stacked")
    made = [federate(model(), clients(), example(method), settings, active=5, engine=e) for e in engines]
    return made[0], made[1]


LOCAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip": 0.3},
    "corrected": {"clip": 0.3, "clip_scope": "corrected"},
    "momentum": {"momentum": 0.5},
    "bare": {"clip": None, "weight_decay": 0.0},
}


@pytest.mark.parametrize(
    ("method", "local"),
    [
        pytest.param(method, local, id=f"{method}-{name}", marks=slow_unless(name == "plain" or method in PAPER))
        for method in CATALOGUE
        for name, local in LOCAL.items()
    ],
)
def test_the_same_as_the_plain_engine(method: str, local: dict[str, Any]) -> None:
    plain, stacked = pair(method, **local)
    for _ in range(5):
        one, other = plain.round(), stacked.round()
        assert one.active == other.active
        assert (one.backward_passes, one.bytes_down, one.bytes_up) == (
            other.backward_passes,
            other.bytes_down,
            other.bytes_up,
        )
        assert other.train_loss == pytest.approx(one.train_loss, abs=1e-11)
        assert other.divergence == pytest.approx(one.divergence, rel=1e-6, abs=1e-10)
    torch.testing.assert_close(stacked.weights, plain.weights, rtol=0, atol=1e-11)
    assert set(stacked.memories) == set(plain.memories)
    for client in plain.memories:
        for slot in ("perturbation", "correction"):
            mine, theirs = getattr(plain.memories[client], slot), getattr(stacked.memories[client], slot)
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("loss", "stacks"),
    [(F.cross_entropy, [[0, 1, 2, 3, 4, 5]]), (lambda o, y: F.cross_entropy(o, y), [[0, 1, 2], [3, 4]])],
    ids=["filled-up", "own-loss"],
)
def test_clients_were_really_stacked(loss: Any, stacks: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sizes where the loss can ignore what fills a batch up; else those of one size, and one alone is plain."""
    found: list[list[int]] = []
    train = stacked_engine.train_stack

    def spy(step: Any, entries: Any, *more: Any) -> Any:
        found.append([entry.member.client for entry in entries])
        return train(step, entries, *more)

    monkeypatch.setattr(stacked_engine, "train_stack", spy)
    settings = fl.LocalTraining(epochs=1, batch_size=5, loss=loss)
    federate(model(), clients(), "fedavg", settings, engine="stacked").round()
    assert found == stacks


@pytest.mark.parametrize("size", [1, 4, 5, 7, 10])
def test_the_order_of_samples_is_the_plain_loops(size: int) -> None:
    order = orders_of([2, 1], size, 5, 3 * -(-size // 5))[1]
    plain = batch_indices(size, 5, 3, False, torch.Generator().manual_seed(1))
    places = [torch.arange(size) if isinstance(chosen, slice) else chosen for chosen in plain]
    assert [row[row >= 0].tolist() for row in order] == [chosen.tolist() for chosen in places]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"workers": 2}, "needs one worker, got 2: .* or the plain engine"),
    ],
)
def test_what_it_would_not_keep_to_is_refused(settings: dict[str, Any], why: str) -> None:
    """More workers make stacks of other sizes, and a convolution or a second thread then gives other last bits."""
    with pytest.raises(ValueError, match=why):
        federate(model(), clients(), "fedavg", engine="stacked", **settings)


def single_precision(method: str, engine: Any, precision: Any, make: Any = None) -> torch.Tensor:
    """After two rounds in which no client is alone: one alone goes to the plain engine."""
    torch.manual_seed(0)
    net = make() if make else nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    settings = fl.LocalTraining(lr=0.2, epochs=2, batch_size=5)
    fed = federate(net, clients(torch.float32), method, settings, engine=engine, precision=precision, threads=1)
    for active in ([0, 1, 2], [0, 1, 3, 4]):
        fed.round(active)
    return fed.weights


class Twice(nn.Module):
    """One weight used twice: its gradient is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.square(torch.tanh(self.square(x))))
        return output


@pytest.mark.parametrize("make", [None, Twice])
@pytest.mark.parametrize("method", ["fedavg", "fedsmoo", "fedlesam-s", "freesam"])
def test_bf16_is_bf16(method: str, make: Any) -> None:
    """As near to the plain engine's bf16 as that precision goes, and further from fp32."""
    half, plain_half = (single_precision(method, engine, "bf16", make) for engine in ("stacked", "plain"))
    full = single_precision(method, "stacked", "fp32", make)
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    rounding = float((plain_half - full).abs().max())
    assert float((half - plain_half).abs().max()) < 2 * rounding
    assert float((half - full).abs().max()) > 0.2 * rounding


def test_the_forward_pass_of_a_stack_is_in_bf16() -> None:
    seen: list[torch.dtype] = []

    class Spy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = super().forward(input)
            seen.append(output.dtype)
            return output

    settings = fl.LocalTraining(epochs=1, batch_size=12)
    fed = federate(Spy(6, 3), clients(torch.float32), "fedavg", settings, engine="stacked", precision="bf16")
    seen.clear()
    fed.round([0, 1, 2])
    assert seen == [torch.bfloat16] * 3, "two of them look whether samples are apart"


def test_random_layers_and_buffers_are_refused() -> None:
    settings = fl.LocalTraining(epochs=1, batch_size=5)
    drops = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).double()
    with pytest.raises(ValueError, match="stacked engine cannot train this model"):
        federate(drops, clients(), "fedavg", settings, engine="stacked").round()
    norms = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match=r"buffers such as BatchNorm's; use the plain engine"):
        federate(norms, clients(), "fedavg", settings, engine="stacked").round()


def test_a_scripted_model_is_refused() -> None:
    """It would keep its own weights and train another model."""
    scripted = torch.jit.script(model())
    with pytest.raises(ValueError, match="scripted model"):
        federate(scripted, clients(), "fedavg", fl.LocalTraining(), engine="stacked").round()


def test_a_client_that_diverges_is_named() -> None:
    broken = clients()
    settings = fl.LocalTraining(epochs=1, batch_size=20)
    federation = federate(model(), broken, "fedavg", settings, engine="stacked")
    broken[1][0][3] = torch.inf  # before, it would have been refused
    before = federation.weights
    with pytest.raises(fl.NotFinite, match="round 0, client 1"):
        federation.round()
    assert torch.equal(federation.weights, before)
    assert federation.round(active=[0, 2, 3]).round == 0


def test_a_client_keeps_its_own_state_not_the_whole_stack() -> None:
    _, stacked = pair("fedsmoo")
    stacked.round()
    kept = [tensor for memory in dict(stacked.memories).values() for tensor in memory.flatten().values()]
    assert kept
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)


class Holey(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample 3 of the second client is not finite."""

    def __init__(self, client: int) -> None:
        self.client, (self.x, self.y) = client, clients()[client]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i] * (torch.nan if (self.client, i) == (1, 3) else 1), self.y[i]


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_an_error_says_the_same_in_both_engines(engine: str) -> None:
    """No learning rate helps against a sample that is not finite."""
    fed = federate(model(), [Holey(i) for i in range(3)], "fedavg", engine=engine)
    with pytest.raises(fl.NotFinite, match=r"client 1: .*x of sample 3 is not finite; repair the sample"):
        fed.round()


def test_there_is_a_program_for_every_form_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten sizes that the loss cannot fill up; the compiler gives back what it is given, which runs as it is."""
    made: list[Any] = []

    def compiled(program: Any, tensors: list[torch.Tensor]) -> Any:
        made.append(program)
        return program

    monkeypatch.setattr("torch._inductor.compile", compiled)
    draw, each = torch.Generator().manual_seed(3), [n for n in range(2, 12) for _ in range(2)]
    x = [torch.randn(n, 6, generator=draw, dtype=torch.float64) for n in each]
    data = [(part, torch.randint(0, 3, (len(part),), generator=draw)) for part in x]
    settings = fl.LocalTraining(epochs=2, batch_size=20, loss=lambda o, y: F.cross_entropy(o, y))
    plain = federate(model(), data, "fedlesam-s", settings)
    stacked = federate(model(), data, "fedlesam-s", settings, engine="stacked", compile=True)
    for _ in range(2):
        plain.round(), stacked.round()
    torch.testing.assert_close(stacked.weights, plain.weights, rtol=0, atol=1e-11)
    assert len(made) == 10 + 1, "the sums of all of them are one more"


class Mixing(nn.Module):
    """Looks at a sample beside the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(torch.cat([h, h.mean(0, keepdim=True).expand_as(h)], 1))


@pytest.mark.parametrize("how", [{"engine": "stacked"}, {"engine": "stacked", "compile": True}, {"stack_runs": 8}])
def test_batches_of_a_model_that_mixes_samples_are_not_filled_up(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda program, tensors: program)
    draw, sizes = torch.Generator().manual_seed(3), (9, 9, 7, 7, 5)
    data = [(torch.randn(n, 6, generator=draw).double(), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]
    found = []
    for settings in ({}, how):
        torch.manual_seed(0)
        execution = fl.Execution(threads=1, **settings)
        fed = fl.Federation(Mixing().double(), data, "fedsam", fl.LocalTraining(batch_size=4), execution=execution)
        for _ in range(2):
            fed.round()
        found.append(fed.weights)
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)


COMPILED = """
import torch
from fedlesam import Execution, Federation, LocalTraining
torch.manual_seed(0)
clients = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (8, 8, 7, 3)]
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
def train(method, compile):
    local = LocalTraining(epochs=2, batch_size=4, clip=0.5)
    fed = Federation(model, clients, method, local, execution=Execution(engine="stacked", compile=compile, threads=1))
    for _ in fed.run(3):
        pass
    assert sum(program.run is not None for program in fed._local_engine.step._programs) == compile
    return fed.weights
for method in ("fedsmoo", "fedlesam-s"):
    torch.testing.assert_close(train(method, True), train(method, False), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_is_close_and_compiled_once() -> None:
    """The learning rate changes every round, the number every step, the clients have other sizes: one program."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "runs uncompiled" not in done.stderr

"""A compiled step: one program without a loop over clients; what it is rewritten to is the same to rounding."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from worlds import PAPER, slow_unless

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE, example
from fedlesam.engines import _compile
from fedlesam.engines._compile import CHUNK, SHORT


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", [3, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_norms_in_chunks(size: int) -> None:
    x = normal(2, size)
    assert torch.allclose(_compile._norm(x, 2, [1]), torch.linalg.vector_norm(x, dim=1))
    assert _compile._norm(x, 1, [1]) is _compile._norm(x, 2, [0]) is NotImplemented
    assert _compile._norm(x, 2, [1], True) is _compile._norm(x, 2, [1], dtype=torch.float64) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int8])
def test_what_is_not_computed_as_it_is_stored_is_left_to_pytorch(dtype: torch.dtype) -> None:
    """Squares of half precision overflow, those of complex numbers are no moduli, and sums of bytes are longer."""
    x = (300 * normal(2, 5000)).to(dtype)
    assert _compile._norm(x, 2, [1]) is NotImplemented
    assert _compile._product(x[:, None, :7], x[:, :7, None]) is NotImplemented


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("terms", [1, 7, SHORT])
def test_products_of_few_terms(terms: int, turned: bool) -> None:
    a = normal(3, terms, 5).transpose(1, 2) if turned else normal(3, 5, terms)
    b = normal(3, terms, 4)
    assert torch.allclose(_compile._product(a, b), torch.bmm(a, b), atol=1e-6)


def test_other_products_are_left_to_pytorch() -> None:
    assert _compile._product(normal(3, 5, SHORT + 1), normal(3, SHORT + 1, 4)) is NotImplemented
    assert _compile._product(normal(3, 5, 7), normal(3, 4, 7).transpose(1, 2)) is NotImplemented
    assert _compile._product(normal(3, 5, 7).to("meta"), normal(3, 7, 4).to("meta")) is NotImplemented


def test_what_is_used_often_is_computed_once() -> None:
    """A number of each row, before it is spread over its row, and the first matrix of a product."""

    def clip(x: Tensor, a: Tensor) -> Tensor:
        factor = (1 / torch.linalg.vector_norm(x, dim=1)).clamp(max=1)
        product = _compile._product(a.exp(), x.view(3, 1, 5))
        return x * factor.view(-1, 1) + (x * 2).view(len(x), -1) + product[:, 0]

    x, a = normal(3, 5), normal(3, 2, 1)
    traced = make_fx(clip)(x, a)
    _compile._compute_once(traced)
    stored = traced.graph.find_nodes(op="call_function", target=torch.ops.prims.inductor_force_stride_order.default)
    stored += traced.graph.find_nodes(op="call_function", target=torch.ops.prims.inductor_force_stride_order)
    assert sorted(tuple(node.args[0].meta["val"].shape) for node in stored) == [(3,), (3, 2, 1)]
    assert torch.equal(traced(x, a), clip(x, a))


def of_views(u: Tensor) -> tuple[Tensor, ...]:
    """Numbers and matrices that are parts of what is computed, not all of it."""
    m, number = (u[:, :32] * 2).view(8, 4, 8), (u * 2)[:, 7]
    left, right = m.chunk(2, 2)
    return (
        number.view(8, 1) * u,
        (u * 2).unbind(1)[5].view(8, 1) * u,
        torch.bmm(left, right),
        torch.bmm(left.transpose(1, 2), right),
        torch.bmm(m.tanh().transpose(1, 2), right),
        torch.bmm(u[:, :1, None].exp().expand(8, 4, 4), right),
        u.exp().select(1, 3).view(8, 1) * u + torch.linalg.vector_norm(u, dim=1).view(8, 1),
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_views_of_what_is_computed_are_read_where_they_are() -> None:
    u = normal(8, 40)
    for found, expected in zip(_compile.compiled(of_views, [u.clone()])(u.clone()), of_views(u), strict=True):
        torch.testing.assert_close(found, expected)


class Gate(nn.Module):
    """Weights of which single entries and slices are factors."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.mix = nn.Parameter(torch.ones(3)), nn.Parameter(normal(4, 6))
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        g = self.gates.softmax(0)
        return self.last((g[0] * self.first(x) + g[1] * (self.mix @ x.T).T + g[2] * x[:, :4]).tanh())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "random-step"])
def test_a_model_whose_weights_are_taken_apart(method: str) -> None:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(4)]
    found = []
    for how in (fl.Execution(engine="stacked", compile=True, threads=1), fl.Execution(threads=1)):
        torch.manual_seed(0)
        fed = fl.Federation(Gate(), data, example(method), fl.LocalTraining(batch_size=4, epochs=2), execution=how)
        for _ in range(3):
            fed.round()
        found.append(fed.weights)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.fixture
def no_loop_over_clients() -> Iterator[None]:
    """An operation that a map has no rule for is called client by client, with a warning that few see."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def federation(method: str, how: fl.Execution, **local: Any) -> fl.Federation:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(10, 6, generator=draw).double(), torch.randint(0, 3, (10,), generator=draw)) for _ in range(4)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    settings = fl.LocalTraining(epochs=2, batch_size=5, **local)
    return fl.Federation(model, data, example(method), settings, execution=how)


ADAPTIVE = [name for name in CATALOGUE if name in ("fedavg", "fedsam", "fedlesam", "fedadam")]


@pytest.mark.usefixtures("no_loop_over_clients")
@pytest.mark.parametrize(
    ("method", "local"),
    [pytest.param(m, {}, marks=slow_unless(m in {*PAPER, "fedsol", "fedgmt", "random-step"})) for m in CATALOGUE]
    + [(m, {"optimizer": "adamw", "lr": 0.01}) for m in ADAPTIVE]
    + [("fedlesam-s", {"momentum": 0.5, "clip": 0.3, "clip_scope": "corrected"})],
)
def test_a_step_is_one_program(method: str, local: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no number, and the weights are those of the plain engine; the compiler gives back what it is given."""
    made: list[Any] = []
    monkeypatch.setattr("torch._inductor.compile", lambda program, tensors: made.append(program) or program)
    stacked = federation(method, fl.Execution(engine="stacked", compile=True, threads=1), **local)
    plain = federation(method, fl.Execution(threads=1), **local)
    for _ in range(3):
        stacked.round(), plain.round()
    torch.testing.assert_close(stacked.weights, plain.weights, rtol=0, atol=1e-9)
    programs = stacked._local_engine.step._programs  # another one where clients remember what they did not before
    assert len(programs) <= 2
    assert all(program.run is not None for program in programs)
    operations = {str(node.target) for program in made for node in program.graph.nodes}
    assert not [name for name in operations if "_local_scalar_dense" in name]


def test_without_a_compiler_the_step_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(program: object, tensors: object) -> None:
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.compile", fails)
    stacked = federation("fedsam", fl.Execution(engine="stacked", compile=True, threads=1))
    with caplog.at_level(logging.WARNING):
        stacked.round()
    plain = federation("fedsam", fl.Execution(engine="stacked", threads=1))
    plain.round()
    assert "the step cannot be compiled here, it runs uncompiled" in caplog.text
    assert torch.equal(stacked.weights, plain.weights)


ROUND = """
import torch
import fedlesam as fl
torch.manual_seed(0)
clients = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
how = fl.Execution(engine="stacked", compile=True, threads=1)
fed = fl.Federation(model, clients, "fedlesam-s", fl.LocalTraining(epochs=1, batch_size=4), execution=how)
fed.round()
[program] = fed._local_engine.step._programs
assert program.run is not None
print(fed.weights.tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_another_process_compiles_nothing_anew(tmp_path: Path) -> None:
    """PyTorch lowers the step again in every process; the C++ that comes out is the same, and its kernels are there."""
    log, compiler = tmp_path / "log", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\nexec "{shutil.which("g++")}" "$@"\n')
    compiler.chmod(0o755)
    compiled, weights = [], []
    for hashes in ("1", "2"):  # the order of sets differs
        where = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": hashes}
        log.write_text("")
        done = subprocess.run(
            [sys.executable, "-c", ROUND], env=os.environ | where, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        calls = log.read_text().splitlines()
        compiled.append(sum(" -o " in call and " -E " not in call for call in calls))  # -E only reads a header
        weights.append(done.stdout)
    assert compiled[0] > 0
    assert compiled[1] == 0
    assert weights[0] == weights[1]

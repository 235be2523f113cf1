"""Federations that share a stack: each as if it were alone, bit for bit, and as the plain engine to rounding."""

import dataclasses
import gc
import random
import shutil
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from worlds import PAPER, slow_unless

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE
from fedlesam.core import seeds
from fedlesam.core.client import local_update
from fedlesam.core.computing import settled_objects
from fedlesam.core.record import Record
from fedlesam.core.slots import State
from fedlesam.engines import _mapped
from fedlesam.engines.stack import Stack
from fedlesam.engines.stacked import NotStackable
from fedlesam.rules.correction import ControlVariates
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.together import train_together

ROWS, ROUNDS = 16, 3
CORRECTED = {"momentum": 0.5, "clip": 0.3, "clip_scope": "corrected"}


def clients(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of other sizes in every run."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (12, 12, 9, 5, (7 + seed) % 11 + 1)
    return [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]


def federation(method: str, seed: int, stack: Stack | None, plain: bool = False, **local: Any) -> fl.Federation:
    """A run with its own data, model, learning rate, weight decay and hyper-parameters."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    takes = fl.algorithms.hyperparameters(method)
    given = {"rho": 0.05 + 0.01 * seed, "lam": 0.1 + 0.02 * seed, "alpha": 0.1 + 0.1 * seed, "threshold": 0.2}
    algorithm = fl.algorithms.get(method, **{name: value for name, value in given.items() if name in takes})
    settings = fl.LocalTraining(lr=0.1 + 0.05 * seed, batch_size=5, epochs=2, weight_decay=1e-3 * (seed + 1), **local)
    how = fl.Execution(threads=1, stack_runs=None if plain else ROWS)
    return fl.Federation(net, clients(seed), algorithm, settings, active=3, seed=seed, execution=how, _stack=stack)


def facts(record: Record) -> tuple[Any, ...]:
    return record.active, record.train_loss, record.divergence, record.backward_passes, record.bytes_up, record.dropped


def together(
    method: str, runs: Iterable[int], compile: bool = False, **local: Any
) -> dict[int, tuple[torch.Tensor, list[Any]]]:
    """The weights and records of runs that share a stack; no client is left to the plain loop."""
    stack, found, alone = Stack(ROWS, compile), {}, list[int]()

    def one(seed: int) -> None:
        fed = federation(method, seed, stack, **local)
        records = [facts(fed.round()) for _ in range(ROUNDS + seed % 2)]  # some are longer
        found[seed] = fed.weights, records

    def plain(*given: Any, client: int, **more: Any) -> Any:
        alone.append(client)
        return local_update(*given, client=client, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlesam.engines.serial.local_update", plain)
        stack.run([partial(one, seed) for seed in runs])
    assert not alone
    return found


@pytest.mark.parametrize(
    ("method", "local"),
    [pytest.param(m, {}, marks=slow_unless(m in {*PAPER, "fedgmt", "dp-fedsam"})) for m in CATALOGUE]
    + [(m, CORRECTED) for m in ("fedavg", "fedlesam-s", "fedsmoo", "mofedsam")],
)
def test_a_run_has_its_own_bits_whoever_shares_the_stack(method: str, local: dict[str, Any]) -> None:
    few, many = (together(method, seeds, **local) for seeds in ([3], [4, 3, 2, 1, 0, 6, 7]))
    assert set(many) == {4, 3, 2, 1, 0, 6, 7}
    assert torch.equal(many[3][0], few[3][0])
    assert many[3][1] == few[3][1]
    plain = federation(method, 3, None, plain=True, **local)
    for _, loss, divergence, *counted in many[3][1]:
        record = plain.round()
        assert facts(record)[3:] == tuple(counted)
        assert record.train_loss == pytest.approx(loss, abs=1e-5)
        assert record.divergence == pytest.approx(divergence, rel=1e-2, abs=1e-6)
    torch.testing.assert_close(many[3][0], plain.weights, rtol=0, atol=3e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("method", ["fedsam", "fedlesam-s"])
def test_a_compiled_run_has_its_own_bits_whoever_shares_the_stack(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    few, many = (together(method, seeds, compile=True) for seeds in ([3], [4, 3, 2, 1, 0]))
    assert "runs uncompiled" not in caplog.text
    assert torch.equal(many[3][0], few[3][0])
    assert many[3][1] == few[3][1]
    torch.testing.assert_close(few[3][0], together(method, [3])[3][0], rtol=1e-4, atol=1e-5)


def test_they_were_really_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five runs of three clients fill one stack of 16 rows: as many steps as the longest client has."""
    steps: list[int] = []
    made = _mapped.MappedStep._step
    monkeypatch.setattr(
        _mapped.MappedStep, "_step", lambda self, rows, *a: steps.append(rows.width) or made(self, rows, *a)
    )
    together("fedsam", range(5))
    checks, rounds, longest = 3, ROUNDS + 1, 6
    assert len(steps) <= checks + rounds * longest
    assert set(steps) == {ROWS}


def test_a_client_that_diverges_leaves_the_others_their_bits() -> None:
    def run(seeds: Iterable[int], huge: bool) -> dict[int, torch.Tensor]:
        stack, found = Stack(ROWS, compile=False), {}

        def one(seed: int) -> None:
            fed = federation("fedavg", seed, stack, clip=None)
            if huge and seed == 2:
                fed.clients[0][0].fill_(torch.inf)
                fed.clients[1][0].fill_(torch.inf)
            record = [fed.round([0, 1, 2]) for _ in range(3)][-1]
            found[seed] = fed.weights
            if huge and seed == 2:
                assert record.dropped is not None
                assert set(record.dropped) == {0, 1}

        stack.run([partial(one, seed) for seed in seeds])
        return found

    good, bad = run([0, 2, 3], huge=False), run([0, 2, 3], huge=True)
    assert set(bad) == {0, 2, 3}
    assert all(torch.equal(good[seed], bad[seed]) for seed in (0, 3))


def test_what_does_not_keep_rows_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the step itself is made to depend on a row's place."""
    made = _mapped.MappedStep._step

    def leaky(self: Any, rows: Any, shared: Any, own: Any, *batch: Any) -> torch.Tensor:
        losses: torch.Tensor = made(self, rows, shared, own, *batch)
        own["u"].mul_(1 + 1e-6 * torch.arange(len(own["u"]))[:, None])
        return losses

    monkeypatch.setattr(_mapped.MappedStep, "_step", leaky)
    with pytest.raises(NotStackable, match="depend on who shares its stack"):
        federation("fedavg", 0, None).round()


def test_every_program_is_checked_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule with a teacher has batches of two sizes; here the step depends on a row's place for the smaller ones."""
    made = _mapped.MappedStep._step

    def leaky(self: Any, rows: Any, shared: Any, own: Any, batch: Any, number: Any) -> torch.Tensor:
        losses: torch.Tensor = made(self, rows, shared, own, batch, number)
        if batch[1].shape[1] < 5:
            own["u"].mul_(1 + 1e-6 * torch.arange(len(own["u"]))[:, None])
        return losses

    monkeypatch.setattr(_mapped.MappedStep, "_step", leaky)
    stack = Stack(ROWS, compile=False)
    fed = federation("fedsol", 0, stack)
    before = fed.weights
    for _ in range(2):
        with pytest.raises(NotStackable, match="depend on who shares its stack"):
            fed.round([0, 1])
    assert torch.equal(fed.weights, before)


@pytest.mark.parametrize("compile", [False, True])
def test_a_program_is_checked_once(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    check = _mapped.MappedStep._check_apart
    monkeypatch.setattr(
        _mapped.MappedStep, "_check_apart", lambda self, rows, given: checks.append(1) or check(self, rows, given)
    )
    monkeypatch.setattr("torch._inductor.compile", lambda program, tensors: program)
    stack = Stack(ROWS, compile)
    fed = federation("fedsol", 0, stack)
    for _ in range(3):
        fed.round([0, 1])
    [method] = stack._methods
    assert len(checks) == len(method.step._programs) == 2, "whole batches and the last of an epoch"
    assert all((program.run is not None) == compile for program in method.step._programs)


def test_a_step_that_turns_out_not_to_compile_is_checked_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded step takes other rows than a compiled one."""
    monkeypatch.setattr(_mapped, "FROM", 2)
    expected = together("fedsam", [0])[0]

    def fails(program: object, tensors: object) -> None:
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.compile", fails)
    found = together("fedsam", [0], compile=True)[0]
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_several_threads_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="stack_runs needs one thread, got 2"):
        fl.Federation(nn.Linear(6, 3), clients(0), execution=fl.Execution(threads=2, stack_runs=ROWS))


def test_other_methods_and_models_do_not_mix() -> None:
    """They may meet at one stack; each has stacks of its own."""
    stack, found = Stack(ROWS, compile=False), {}

    def one(method: str) -> None:
        fed = federation(method, 1, stack)
        for _ in range(ROUNDS + 1):
            fed.round()
        found[method] = fed.weights

    stack.run([partial(one, method) for method in ("fedavg", "fedlesam-s")])
    assert all(torch.equal(found[method], together(method, [1])[1][0]) for method in found)


class Scaled(nn.Module):
    """What differs from model to model is in no parameter, and its text does not show it."""

    def __init__(self, scale: object) -> None:
        super().__init__()
        self.net, self.scale = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale[0] if isinstance(self.scale, list) else self.scale
        return self.net(x) * scale


@pytest.mark.parametrize("form", [float, lambda scale: [scale], lambda scale: [torch.tensor(scale)], torch.tensor])
def test_models_that_differ_in_an_attribute_do_not_share_a_stack(form: Callable[[float], object]) -> None:
    def run(seed: int, stack: Stack | None, found: dict[int, torch.Tensor]) -> None:
        torch.manual_seed(seed)
        how = fl.Execution(threads=1, stack_runs=None if stack is None else ROWS)
        model = Scaled(form(1.0 + seed))
        fed = fl.Federation(model, clients(0), "fedavg", seed=seed, execution=how, _stack=stack)
        for _ in range(2):
            fed.round()
        found[seed] = fed.weights

    shared: dict[int, torch.Tensor] = {}
    plain: dict[int, torch.Tensor] = {}
    stack = Stack(ROWS, compile=False)
    stack.run([partial(run, seed, stack, shared) for seed in range(2)])
    for seed in range(2):
        run(seed, None, plain)
        assert torch.allclose(shared[seed], plain[seed], atol=1e-5), seed


def test_the_generators_are_as_before_after_all_runs() -> None:
    """They are restored once for all of them."""
    seeds.reseed_everything(3, torch.device("cpu"))
    expected = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
    seeds.reseed_everything(3, torch.device("cpu"))
    together("random-step", [0, 1])
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected  # noqa: NPY002


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_are_collected_again_after_all_runs(frozen: bool) -> None:
    """Unless the caller had frozen some: they stay so."""
    counts: list[int] = []
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        Stack(ROWS, compile=False).run([lambda: counts.append(gc.get_freeze_count())])
        assert counts[0] > 0
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()  # as it is in all tests


def test_another_method_is_not_taken_for_the_last_one() -> None:
    """A stack remembers what a federation trained with in its last round."""
    stack = Stack(ROWS, compile=False)
    fed = federation("fedavg", 0, stack)
    passes = fed.round([0, 1]).backward_passes
    fed._local_engine.algorithm = fl.algorithms.get("fedsam")
    assert fed.round([0, 1]).backward_passes == 2 * passes
    assert len(stack._methods) == 2


def test_a_stack_is_gone_after_its_runs() -> None:
    """In a cycle it would stay, with its programs, until a whole sweep has ended."""
    stacks: list[weakref.ref[Stack]] = []

    def run(seed: int, stack: Stack | None) -> None:
        assert stack is not None
        stacks.append(weakref.ref(stack))
        federation("fedlesam-s", seed, stack).round()

    config = resolve(RunConfig(stack_runs=ROWS))
    with settled_objects:
        train_together(config, [partial(run, seed) for seed in range(2)])
        gc.collect()
        assert [stack() for stack in stacks] == [None, None]


@dataclasses.dataclass(frozen=True)
class Echo(ControlVariates):
    """Uploads what it was given, too."""

    def upload(self, before: State, after: State) -> State:
        return {**super().upload(before, after), "before": before.get("c", after["c"])}


def test_what_one_client_of_a_stack_uploads_is_measured_as_of_several() -> None:
    """Eight rows for nine clients; one of their vectors is no new one."""
    found = []
    for stack in (None, Stack(8, False), Stack(ROWS, False)):
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(0)
        data = [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(9)]
        algorithm = dataclasses.replace(fl.algorithms.scaffold(), correction=Echo())
        how = fl.Execution(threads=1, stack_runs=None if stack is None else stack.width)
        local = fl.LocalTraining(batch_size=4, epochs=2)
        fed = fl.Federation(nn.Linear(6, 3), data, algorithm, local, execution=how, _stack=stack)
        found.append([fed.round().divergence for _ in range(3)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)

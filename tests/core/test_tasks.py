"""The seven kinds of task, on both engines, against the plain oracle; and what holds for all of them."""

import pickle
from pathlib import Path

import pytest
import torch
from agreement import SETTINGS, assert_agree, hyper_of
from oracle import Oracle
from seven_tasks import KINDS, SIZES
from worlds import assert_same_bits, federate, play, states, training

import fedlesam as fl
from fedlesam import Federation, algorithms, load_run
from fedlesam.engines.stacked import StackedEngine
from fedlesam.probes.loss import GlobalLoss

SCHEDULE = ((0, 2), (1, 4, 3), (0, 2, 1), (4, 3))
METHODS = ("fedavg", "fedsam", "fedlesam-s", "fedsmoo")


def epochs(round: int, client: int) -> int:
    return 1 + round % 2


each_kind = pytest.mark.parametrize("kind", KINDS)


def federation(kind: str, method: str = "fedsam", **settings: object) -> Federation:
    world = KINDS[kind]()
    algorithm = algorithms.get(method, **hyper_of(method))
    local = settings.pop("local", None) or training()
    return federate(
        world.model, world.clients, algorithm, local, task=world.task, test=world.clients[1], seed=7, **settings
    )


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("method", METHODS)
@each_kind
def test_against_the_oracle(kind: str, method: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, stacks = KINDS[kind](), []
    settings = {**SETTINGS, **hyper_of(method), "clip_scope": "loss"}
    oracle = Oracle(method, world.model, world.rows, epochs, seed=7, slope=world.slope, **settings)
    for active in SCHEDULE:
        oracle.round(active)
    feed = StackedEngine._feed
    monkeypatch.setattr(StackedEngine, "_feed", lambda *a: stacks.append([m.client for m in a[1]]) or feed(*a))
    fed = play(federation(kind, method, engine=engine, local=training(epochs=epochs)), SCHEDULE)
    assert stacks == ([[0, 2], [1, 4], [0, 2]] if engine == "stacked" else [])
    assert_agree(states(fed), oracle.states(), 1e-10)


@each_kind
def test_the_measures(kind: str) -> None:
    """The loss is the plain one; the metrics are there by name, and the first is the one that ranks."""
    fed = federation(kind)
    record = fed.round([0, 1])
    world = KINDS[kind]()
    weights = dict(zip([n for n, _ in world.model.named_parameters()], fed._flat.views(fed.weights), strict=True))
    assert record.test_loss == pytest.approx(float(world.plain(weights, world.whole[1])), abs=1e-12)
    first = {"multilabel": "f1", "regression": "mae", "language_model": "perplexity", "segmentation": "mean_iou"}
    assert next(iter(record.metrics)) == first.get(kind, "accuracy")
    if kind == "language_model":
        assert record.metrics["perplexity"] == pytest.approx(2.718281828459045**record.test_loss, rel=1e-6)


@pytest.mark.parametrize("kind", ["classification", "language_model", "huggingface"])
def test_workers_and_probes_change_no_bit(kind: str) -> None:
    one = federation(kind, "fedlesam-s", local=training(epochs=1))
    alone = [one.round([0, 1, 2]) for _ in range(2)]
    loss = GlobalLoss.of(one, 20)
    assert loss.value(one.weights) == GlobalLoss.of(one, 20).gradient(one.weights)[0]
    with federation(kind, "fedlesam-s", local=training(epochs=1), workers=2) as two:
        both = [two.round([0, 1, 2]) for _ in range(2)]
        assert_same_bits({"w": one.weights}, {"w": two.weights})
    assert [r.metrics for r in alone] == [r.metrics for r in both]
    assert [r.test_loss for r in alone] == [r.test_loss for r in both]


@pytest.mark.parametrize("kind", ["classification", "multilabel"])
def test_probes_while_training_change_no_bit(kind: str, tmp_path: Path) -> None:
    """All of them, of batches that are dicts and nested tuples."""
    plain = federation(kind, "fedlesam-s", local=training(epochs=1), active=3)
    plain.fit(2, progress=False)
    fed = federation(kind, "fedlesam-s", local=training(epochs=1), active=3)
    fed.fit(2, tmp_path, probe="sharpness hessian:draws=2 drift estimate", progress=False)
    assert_same_bits(states(plain), states(fed))
    assert {one.probe for one in load_run(tmp_path).measurements} == {"sharpness", "hessian", "drift", "estimate"}


@pytest.mark.parametrize("kind", ["classification", "multilabel", "language_model"])
def test_resume(kind: str, tmp_path: Path) -> None:
    """From a saved state and saved memories on, the bits are those of a run that never stopped."""
    through, first, second = (federation(kind, "fedlesam-s") for _ in range(3))
    play(through, SCHEDULE)
    play(first, SCHEDULE[:2])
    saved = first.save_memories(tmp_path)
    second.restore(first.state, tmp_path, saved)
    play(second, SCHEDULE[2:])
    assert_same_bits(states(through), states(second))


@each_kind
def test_the_global_loss_is_the_mean_of_the_clients(kind: str) -> None:
    fed, world = federation(kind), KINDS[kind]()
    weights = dict(zip([n for n, _ in world.model.named_parameters()], fed._flat.views(fed.weights), strict=True))
    mean = sum(float(world.plain(weights, data)) for data in world.whole) / len(SIZES)
    assert GlobalLoss.of(fed).value(fed.weights) == pytest.approx(mean, rel=1e-12)


READY = (
    "classification",
    "binary",
    "multilabel",
    "regression",
    "language_model",
    "segmentation",
    "huggingface",
)


@pytest.mark.parametrize("kind", READY)
def test_a_task_is_equal_to_one_made_again_and_can_be_sent(kind: str) -> None:
    """Runs of equal tasks share a stack, and workers on GPUs are new processes."""
    task, again = getattr(fl.Task, kind)(), getattr(fl.Task, kind)()
    sent = pickle.loads(pickle.dumps(task))
    assert sent == task == again
    assert sent.by_class == again.by_class == (kind in ("classification", "huggingface"))
    assert all(task != getattr(fl.Task, other)() for other in READY if other != kind)
    if kind in ("language_model", "segmentation"):
        assert task != getattr(fl.Task, kind)(7)


def test_workers_that_are_new_processes_change_no_bit() -> None:
    """With more than one thread they are not forked."""
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 11, (2, n, 6), generator=draw) for n in (4, 5, 3)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11))
    found = []
    for workers in (1, 2):
        how = fl.Execution(threads=2, workers=workers)
        local = fl.LocalTraining(batch_size=2)
        with Federation(
            model, [(x, y) for x, y in tokens], "fedlesam-s", local, task=fl.Task.language_model(), execution=how
        ) as fed:
            fed.round([0, 1, 2])
            found.append(fed.weights)
    assert_same_bits({"w": found[0]}, {"w": found[1]})


def test_a_step_at_other_weights_is_the_step_there() -> None:
    """What a teacher's objective needs: the outputs of the same batch at the teacher's weights."""
    world = KINDS["classification"]()
    fed = federation("classification")
    model, batch = fed.replica(), world.whole[0]
    here = model.step(world.task, batch)
    there = torch.randn_like(fed.weights)
    found = model.step_at(there, world.task, batch)
    assert not torch.equal(found.outputs, here.outputs)
    model.weights.copy_(there)
    again = model.step(world.task, batch)
    assert torch.equal(found.outputs, again.outputs)
    assert torch.equal(found.loss, again.loss)

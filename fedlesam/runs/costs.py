"""What a method costs by its nature, and what a run will cost, before it is run."""

import math
import os
import shutil
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedlesam.algorithms import Algorithm
from fedlesam.core.batches import (
    RESIDENT,
    Batches,
    ClientData,
    Loadable,
    Stored,
    Streamed,
    given_tensors,
    size_of,
    steps_per_epoch,
)
from fedlesam.core.buffers import Unsupported
from fedlesam.core.local import LocalTraining
from fedlesam.core.slots import Correction, Rule
from fedlesam.core.space import size
from fedlesam.core.state import size_in_bytes
from fedlesam.core.tree import leaves
from fedlesam.core.vectors import is_number
from fedlesam.data.catalogue import FilesNotFound
from fedlesam.data.dataset import DataSet, select
from fedlesam.data.stand_in import is_public, stand_in
from fedlesam.engines.settings import FailurePolicy
from fedlesam.engines.stacked import StackedEngine
from fedlesam.federation import Federation
from fedlesam.runs.build import load_data
from fedlesam.runs.config import RunConfig

PROCESS_BYTES = 300_000_000
"""Python and PyTorch without a model, per process."""


@dataclass(frozen=True)
class Cost:
    """In units of FedAvg's, once the method is under way; counted, not typed in."""

    passes: float
    """Backward passes per local step."""
    down: float
    """Model-sized vectors a client receives per round."""
    up: float
    """And sends."""
    stored: float
    """Model-sized vectors a client holds between its rounds, the model itself included."""
    shared: float
    """Those of them that are the received model itself: clients of one round have the same."""
    server: float
    """Model-sized vectors the server keeps, the model included."""


def measure(algorithm: Algorithm) -> Cost:
    """From two rounds of a small problem.

    Args:
        algorithm: The method.
    """
    model = nn.Linear(256, 256, bias=False)  # beside which single numbers do not count
    clients = [(torch.ones(1, 256), torch.zeros(1, dtype=torch.int64))] * 2
    if algorithm.privacy is not None:  # noise costs none of these, and its epsilon is of no interest here
        algorithm = replace(algorithm, privacy=replace(algorithm.privacy, noise=0.0))
    stop = FailurePolicy(on_error="stop")
    federation = Federation(model, clients, algorithm, LocalTraining(epochs=1), failures=stop)
    try:
        federation.round()
        record = federation.round()
    except (Unsupported, MemoryError):
        raise
    except Exception as error:
        frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if isinstance(f.f_locals.get("self"), Rule)]
        code = frames[-1].f_code if frames else None
        where = f", in {code.co_qualname} of {Path(code.co_filename).name}" if code is not None else ""
        raise ValueError(
            f"the rules of {algorithm!r} fail on a model of one layer: {type(error).__name__}: {error}{where}"
        ) from error
    unit, state = federation.weights.nbytes, federation.state
    per_client, together = round(federation.memories[0].nbytes / unit, 2), round(federation.memories.nbytes / unit, 2)
    return Cost(
        passes=record.backward_passes / len(clients),
        down=round(record.bytes_down / (len(clients) * unit), 2),
        up=round(record.bytes_up / (len(clients) * unit), 2),
        stored=1 + per_client,
        shared=2 * per_client - together,
        server=1 + round(size_in_bytes(state.perturbation, state.correction, state.server) / unit, 2),
    )


@dataclass(frozen=True)
class Prediction:
    """Of a whole run; in bytes where no unit is named."""

    parameters: int
    """The trainable ones of the model."""
    clients: int
    """All there are."""
    active: int
    """Of a round."""
    backward_passes_per_round: float
    """Of all active clients together."""
    bytes_down_per_round: float
    """To all active clients."""
    bytes_up_per_round: float
    """From all active clients."""
    one_client: int
    """What one client remembers."""
    client_memory: int
    """What all clients together remember once every client was active."""
    ram: int
    """All processes of this machine, without the data set and the activations of a forward pass; of a stack that runs
    share, all runs that fill it."""
    gpu: int
    """Of each GPU, with one worker on it: weights, gradients, the method's vectors, one client's memory and the samples
    that lie there, of a stack those of all its rows; without the activations of a forward pass."""
    disk: int
    """Memory beyond the budget, and the results."""
    checkpoint: int
    """One of them: what the server and all clients remember."""
    checkpoints: int
    """The most they take together, while a new one is written beside those kept; they share what did not change.

    Where only a part changes, up to half of the files is memory that is not current any more.
    """


def predict(config: RunConfig, federation: Federation) -> Prediction:
    """What a run will need.

    Args:
        config: Resolved settings.
        federation: One built from them.
    """
    cost = measure(federation.algorithm)
    state, n, k = federation.state, len(federation.clients), federation.active
    vector, buffers = state.weights.nbytes, size_in_bytes(state.buffers)
    ever = min(n, k * config.rounds)
    private = round((cost.stored - 1 - cost.shared) * vector) * ever
    workers = federation.workers
    shared = workers > 1 and config.store == "shared"
    anchors = round(cost.shared * vector * anchors_alive(n, k, config.rounds, 1 if shared else workers))
    before = vector if "estimate" in (config.probe or "") else 0  # the model before, which that probe asks for
    memory, kept = private + anchors, round(cost.server * vector) + buffers + before
    every = config.checkpoint_every
    changed = min(1.0, k / n * every) if isinstance(every, int) else 1.0  # by time all memory may change in between
    in_files = memory if shared else max(0, memory - config.memory)
    fresh = 0 if shared or not config.memory else k * round((cost.stored - 1 - cost.shared) * vector)
    here = min(workers, int(os.environ.get("LOCAL_WORLD_SIZE", workers)))
    perturbation = federation.algorithm.perturbation
    ascends = (2 if perturbation.gradient != "unused" else 0) + (perturbation.mix != 1) + bool(perturbation.teaches)
    sums = 4 if federation.weighting == "examples" else 2
    half = federation.execution.precision == "bf16-pure"  # weights and gradients, each half of a vector
    working = (5 + ascends + half + sums * cost.up + cost.down) * vector
    steps = [_steps(federation, client) for client in _known(federation)]
    answers, rows = k * (1 - federation.failures.dropout), _rows(federation)
    stack = round(rows * _per_row(federation, cost) * vector) if rows > 1 else 0
    runs = max(1, rows // k) if config.stack_runs is not None else 1
    each = round(here * working + cost.server * vector) + memory - in_files + fresh
    return Prediction(
        parameters=state.weights.numel(),
        clients=n,
        active=k,
        backward_passes_per_round=cost.passes * answers * sum(steps) / len(steps),
        bytes_down_per_round=k * (cost.down * vector + buffers),
        bytes_up_per_round=answers * (cost.up * vector + buffers),
        one_client=round((cost.stored - 1) * vector),
        client_memory=memory,
        ram=here * (PROCESS_BYTES + stack) + runs * each,
        gpu=round(working + (cost.server + cost.stored - 1) * vector)
        + _scratch(federation)
        + (_held(federation) if rows == 1 else 0)
        + _resident(federation, rows)
        + stack
        + (2 * rows * round((cost.stored - 1 - cost.shared) * vector) if rows > 1 else 0),  # memory before and after
        disk=in_files + 2 * vector,
        checkpoint=memory + kept,
        checkpoints=memory * (2 if changed < 1 else 1) + kept + round(config.keep * (changed * memory + kept)),
    )


def _scratch(federation: Federation) -> int:
    """Bytes of the vectors that only some settings need."""
    local, rule = federation.local, federation.algorithm.perturbation
    named = [
        local.momentum or local.optimizer == "adamw",
        local.optimizer == "adamw",
        rule.draws and rule.gradient != "unused",
    ]
    return sum(map(bool, named)) * federation.state.weights.nbytes


def _held(federation: Federation) -> int:
    """Bytes of a client's round that are copied on a GPU to places that do not move (core/recorded.py)."""
    algorithm, anchor = federation.algorithm, federation.state.weights
    rule, sent = algorithm.perturbation, federation.state.perturbation
    bias = algorithm.correction.prepare(anchor, {}, federation.state.correction).bias
    states = size_in_bytes(rule.begin(anchor, {}), sent) if rule.gradient != "unused" else 0
    return (1 + rule.is_constant + (bias is not None)) * anchor.nbytes + states


def _resident(federation: Federation, rows: int) -> int:
    """Bytes of the samples on a GPU: of the largest client, or of so many, and of the test set, if they can lie there.

    The pictures of a data set are there beside them.
    """
    first, test = federation.clients[0], federation._local_engine.test
    sample = sum(tensor.nbytes for tensor in _sample(federation))
    shared = first.stays(RESIDENT) if isinstance(first, Stored) else 0
    tested = 0 if test is None else _held_there(test.samples, sample)
    return shared + rows * max(_held_there(client, sample) for client in _known(federation)) + tested


def _sample(federation: Federation) -> list[Tensor]:
    """The tensors of one sample, as a model takes it."""
    first = Batches(federation.clients[0], torch.device("cpu"), federation.task.collate)
    return [leaf for leaf in leaves(first.fetch(torch.tensor([0]), seed=0)) if isinstance(leaf, Tensor)]


def _held_there(data: ClientData, sample: int) -> int:
    """Bytes of samples that lie on a GPU while they are used; 0 of those that go there batch by batch."""
    made = given_tensors(data) is None and not isinstance(data, Loadable)
    streams = data.streams if isinstance(data, Streamed) else made
    return 0 if streams or size_of(data) * sample > RESIDENT else size_of(data) * sample


def _rows(federation: Federation) -> int:
    """The clients that are trained as one computation: rows of a stack, or 1."""
    engine = federation._local_engine
    if not isinstance(engine, StackedEngine):
        return 1
    if engine.stack is not None:
        return engine.stack.width
    entries = max(tensor.numel() for tensor in _sample(federation))
    active = federation.active
    most = engine.most_rows(entries * max(map(size_of, _known(federation))))
    return math.ceil(active / math.ceil(active / most))


def _per_row(federation: Federation, cost: Cost) -> float:
    """Vectors of a row of a stack, without what its client keeps between rounds."""
    local, algorithm = federation.local, federation.algorithm
    rule, correction = algorithm.perturbation, algorithm.correction
    vectors: float = 4  # weights, their gradient, the vector it is clipped in, and the update
    vectors += rule.is_constant + (type(correction).prepare is not Correction.prepare)
    if rule.gradient != "unused":
        vectors += 2 + 2 * rule.draws
    vectors += (not is_number(rule.mix, 1)) + (rule.teaches == "ascent")
    vectors += bool(local.momentum or local.optimizer == "adamw") + (local.optimizer == "adamw")
    if federation.execution.stack_runs is not None:
        vectors += cost.down  # each row has its own model
    vectors += federation.execution.precision == "bf16-pure"
    return float(vectors + cost.up - 1 + cost.stored - 1)


def data_for(config: RunConfig) -> tuple[DataSet, bool]:
    """The data set of a run, or where a public one is not here, zeros of its form; and whether it is the real one.

    Args:
        config: Settings of a run.
    """
    try:
        return load_data(config), True
    except FilesNotFound:
        if not is_public(config.data):
            raise
        return select(stand_in(config.data), config.samples, config.held_out), False


def anchors_alive(clients: int, active: int, rounds: int, holders: int = 1) -> float:
    """The expected number of models of past rounds that some client still keeps; several holders have a copy each.

    Args:
        clients: How many there are.
        active: How many train in a round.
        rounds: How many there will be.
        holders: Processes that keep models of their own.
    """
    again = active / clients
    total = 0.0
    for age in range(min(rounds, 100_000)):
        alive = 1 - (1 - (1 - again) ** age) ** (active / min(holders, active))
        total += alive
        if alive < 1e-6:
            break
    return total * min(holders, active)


def check_fits(predicted: Prediction, config: RunConfig, folder: Path, taken: int = 0) -> None:
    """Refuse a run that this machine cannot hold, and name what would fit.

    Args:
        predicted: What the run needs.
        config: Settings of a run.
        folder: Where it goes.
        taken: Bytes of its checkpoints that are there already.
    """
    if 0 < config.memory < predicted.one_client:
        raise ValueError(
            f"--memory {size(config.memory)} cannot hold the memory of one client, {size(predicted.one_client)}: "
            f"give at least that, or 0 to keep all of it in files"
        )
    ram = available_ram()
    if ram is not None and predicted.ram > ram:
        runs = max(1, (config.stack_runs or 0) // predicted.active)
        kept = predicted.client_memory - (predicted.disk - 2 * 4 * predicted.parameters)
        rest = predicted.ram - runs * max(0, kept)
        room = (ram - rest) // (2 * runs)
        less = "--workers" if config.stack_runs is None else "--stack-runs"
        budget = size(room) if room >= predicted.one_client else "0"
        remedy = f"--memory {budget}" if rest < ram else f"fewer {less} or a smaller model"
        raise ValueError(
            f"the run needs {size(predicted.ram)} of RAM, {size(ram)} are free: it would fit with {remedy}"
        )
    existing = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(existing).free + taken
    if predicted.disk + predicted.checkpoints > free:
        fewer = config.keep > 1 and predicted.disk + 2 * predicted.checkpoint <= free
        raise ValueError(
            f"the run needs {size(predicted.disk)} of disk in {folder} and up to {size(predicted.checkpoints)} for "
            f"checkpoints, {size(free)} are free: choose another --out{', or --keep 1' if fewer else ''}"
        )


def available_ram() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pages = os.sysconf_names.get("SC_AVPHYS_PAGES")
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages is not None else None


def _known(federation: Federation) -> Sequence[ClientData]:
    """The clients that are there: of those that are made when they are drawn, the first is."""
    return federation.clients if isinstance(federation.clients, list | tuple) else [federation.clients[0]]


def _steps(federation: Federation, client: ClientData) -> float:
    """Expected local steps of a client in a round."""
    local = federation.local
    if local.steps is not None:
        return local.steps
    per_epoch = steps_per_epoch(size_of(client), local.batch_size, federation.joins_last)
    epochs = local.epochs
    mean = (epochs[0] + epochs[-1]) / 2 if isinstance(epochs, range) else epochs
    return per_epoch * (mean if isinstance(mean, int | float) else 1)

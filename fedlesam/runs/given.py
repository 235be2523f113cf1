"""What was given in Python, as settings of a run: numbers by their value, models, data and functions by fingerprint."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlesam import algorithms
from fedlesam.core import seeds
from fedlesam.core.batches import ClientData, Loadable, given_tensors, size_of
from fedlesam.core.tree import tree_items
from fedlesam.federation import Federation
from fedlesam.runs.config import METRICS, RunConfig
from fedlesam.runs.kinds import Value

MOST = 1000
"""Clients whose samples are read for the fingerprint of the data; of more, these and their number count."""
LISTED, MADE = 20_000, 100
"""Samples of lists that are read for it, and of Datasets, which may take long to make one: evenly over all of them."""


def config_of(federation: Federation, label: str, **run: Any) -> RunConfig:
    """A federation as the settings of a run. What has no setting of its own is among the hyper-parameters.

    Args:
        federation: The federation.
        label: What the method is called.
        **run: Settings that a federation does not have: rounds, checkpoint_every, and more.
    """
    local, failures, how = federation.local, federation.failures, federation.execution
    given = local.epochs
    epochs: Any = f"{given[0]}-{given[-1]}" if isinstance(given, range) else given
    functions: dict[str, Any] = {"lr_function": local.lr, "epochs_function": epochs, "augmentation": local.augment}
    functions["sampling_function"] = federation.sampling
    return RunConfig(
        **run,
        algorithm=label,
        data=f"python-{data_fingerprint(federation)[:12]}",
        model=f"python-{model_fingerprint(federation)[:12]}",
        split="python",
        clients=len(federation.clients),
        active=federation.active,
        lr=0.1 if callable(local.lr) else local.lr,
        lr_decay=_decay(federation),
        epochs=None if callable(epochs) or local.steps is not None else epochs,
        **{name: getattr(local, name) for name in ("steps", "optimizer", "batch_size", "weight_decay", "clip_scope")},
        clip=local.clip or 0.0,
        momentum=local.momentum,
        augment=local.augment is not None,
        weighting=federation.weighting,
        evaluate_every=federation.evaluate_every,
        dropout=failures.dropout,
        max_update_norm=failures.max_update_norm or 0.0,
        on_client_error=failures.on_error,
        seed=federation.seed,
        precision=how.precision,
        engine=how.engine,
        compile=how.compile,
        threads=federation.threads or torch.get_num_threads(),
        workers=federation.workers,
        store=how.store,
        device=str(federation.state.weights.device),
        hyper={
            **_hyper(federation),
            "task_given": _task(federation)[:12],
            METRICS: fingerprint(federation.task.measured)[:12],
            **{name: fingerprint(value)[:12] for name, value in functions.items() if callable(value)},
        },
    )


def _decay(federation: Federation) -> float | None:
    local = federation.local
    if callable(local.lr) or isinstance(local.lr, str):
        return None
    return federation.algorithm.lr_decay if local.lr_decay is None else local.lr_decay


def _hyper(federation: Federation) -> dict[str, Value]:
    """The method's: by name those of the catalogue, else its three rules."""
    if federation.name is not None:
        takes = algorithms.hyperparameters(federation.name)
        return {name: value for name, value in takes.items() if isinstance(value, int | float | str)}
    rules = {slot: getattr(federation.algorithm, slot) for slot in ("perturbation", "correction", "server")}
    return {slot: _words(rule) for slot, rule in rules.items()}


def _task(federation: Federation) -> str:
    """Of the task: of its metrics only their names and directions, for no weight depends on them."""
    task = federation.task
    names = [(name, metric.better) for name, metric in task.measured.items()]
    return _digest([fingerprint(replace(task, metrics=())), _words(names)])


def model_fingerprint(federation: Federation) -> str:
    """Of the model that was given: its layers and its first weights.

    Args:
        federation: The federation.
    """
    if federation.first_model is None or not federation.state.round:
        module = federation.model
        parts = [_words(module), *(part for item in module.state_dict().items() for part in item)]
        federation.first_model = _digest(parts)
    return federation.first_model


def data_fingerprint(federation: Federation) -> str:
    """Of the clients' samples and the test data: all tensors, and some of the samples that are lists or Datasets.

    Args:
        federation: The federation.
    """
    count = len(federation.clients)
    parts: list[object] = [count]
    test, tests = federation.test_data, federation.test_clients
    with seeds.preserve_rng(torch.device("cpu")):
        for client in range(min(count, MOST)):
            parts += _samples(federation.clients[client], client, count)
        parts += [] if test is None else _samples(test)
        for client in range(0 if tests is None else min(count, MOST)):
            own = tests[client] if tests is not None else None
            parts += ["test", client, *([] if own is None else _samples(own, client, count))]
    return _digest(parts)


def _samples(data: ClientData, client: int = 0, clients: int = 1) -> list[object]:
    given = given_tensors(data)
    if given is not None:
        if isinstance(given, tuple) and all(isinstance(part, Tensor) for part in given):
            return list(given)
        return [part for item in tree_items(given) for part in item]
    size, known = size_of(data), str(getattr(data, "fingerprint", ""))
    found: list[object] = [type(data).__qualname__, known, size]
    if known:
        return found
    if isinstance(data, Loadable):
        return [*found, data.labels()]
    most = LISTED if isinstance(data, list) else MADE
    if client % -(-clients // most):
        return found
    read = min(size, max(1, most // clients))
    places = sorted({number * size // read for number in range(read)} | {size - 1})
    contents = _digest(_read(data, places))
    return [*found, contents] if isinstance(data, list) or contents == _digest(_read(data, places)) else found


def _read(data: Any, places: list[int]) -> Iterable[object]:
    """Samples, as a round would make them; a Dataset may draw."""
    for place in places:
        seeds.reseed_everything(place, torch.device("cpu"))
        try:
            yield from (part for item in tree_items(data[place], "") for part in item)
        except Exception as error:  # who reads it in a round says why
            yield type(error).__name__


def fingerprint(value: object) -> str:
    """Of a function: its code and what it encloses; of a dataclass: its fields; else its repr.

    Args:
        value: Anything that was given.
    """
    return _digest(_parts(value))


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        code, defaults = value.__code__, [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        cells += defaults
        return [value.__qualname__, code.co_code, _words(code.co_consts), _words(code.co_names), _words(cells)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *(fingerprint(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, dict):
        return [part for name, inner in value.items() for part in (str(name), fingerprint(inner))]
    return [getattr(value, "__qualname__", None) or _words(value)]


def _words(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+|, file \"[^\"]*\", line \d+", "", repr(value))


def _text(value: object) -> str:
    return value if isinstance(value, str) else _words(value)


def _digest(parts: Iterable[object]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            tensor = part.detach().cpu().contiguous()
            whole.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        elif isinstance(part, np.ndarray) and part.dtype != object:
            whole.update(f"{part.shape}{part.dtype}".encode() + part.tobytes())
        elif hasattr(part, "tobytes") and hasattr(part, "size"):  # a picture
            whole.update(f"{part.size}".encode() + part.tobytes())
        else:
            whole.update(part if isinstance(part, bytes) else _text(part).encode())
        whole.update(b"\0")
    return whole.hexdigest()

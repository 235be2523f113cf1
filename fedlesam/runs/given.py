"""What was given in Python, as settings of a run: numbers by their value, models, data and functions by fingerprint."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fedlesam import algorithms
from fedlesam.core.batches import ClientData, given_tensors, size_of
from fedlesam.core.tree import leaves
from fedlesam.federation import Federation
from fedlesam.runs.config import RunConfig
from fedlesam.runs.kinds import Value

MOST = 1000
"""Clients whose samples are read for the fingerprint of the data; of more, these and their number count."""


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
            "task_given": fingerprint(federation.task)[:12],
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
    """Of the clients' samples and the test data; samples that are made when they are asked for count by their number.

    Args:
        federation: The federation.
    """
    count = len(federation.clients)
    parts: list[object] = [count]
    for client in range(min(count, MOST)):
        parts += _samples(federation.clients[client])
    test, tests = federation.test_data, federation.test_clients
    parts += [] if test is None else _samples(test)
    for client in range(0 if tests is None else min(count, MOST)):
        own = tests[client] if tests is not None else None
        parts += ["test", client, *([] if own is None else _samples(own))]
    return _digest(parts)


def _samples(data: ClientData) -> list[object]:
    given = given_tensors(data)
    if given is not None:
        return list(leaves(given))
    return [type(data).__qualname__, str(getattr(data, "fingerprint", "")), size_of(data)]


def fingerprint(value: object) -> str:
    """Of a function: its code and what it encloses; of a dataclass: its fields; else its repr.

    Args:
        value: Anything that was given.
    """
    return _digest(_parts(value))


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        code = value.__code__
        return [value.__qualname__, code.co_code, _words(code.co_consts), _words(code.co_names), _words(cells)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *(fingerprint(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, dict):
        return [part for name, inner in value.items() for part in (str(name), fingerprint(inner))]
    return [getattr(value, "__qualname__", None) or _words(value)]


def _words(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+|, file \"[^\"]*\", line \d+", "", repr(value))


def _digest(parts: Iterable[object]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            tensor = part.detach().cpu().contiguous()
            whole.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        else:
            whole.update(part if isinstance(part, bytes) else str(part).encode())
        whole.update(b"\0")
    return whole.hexdigest()

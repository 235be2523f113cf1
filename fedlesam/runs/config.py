"""The settings of a run: one table of fields from which flags, TOML keys, help and checks all follow.

Imports no PyTorch, so that `fedlesam --help` answers at once.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fedlesam.core import choices
from fedlesam.core.checks import Range, check_params, check_range
from fedlesam.core.choices import ClipScope, Engine, OnError, Optimizer, Precision, StoreKind, Weighting
from fedlesam.core.names import one_line
from fedlesam.data.catalogue import is_domains, is_files
from fedlesam.runs import kinds
from fedlesam.runs.kinds import KINDS, Option, Value, active_clients, byte_size, epoch_range, option, seconds_of

WHAT, LOCAL, METHOD, RUN = "What to train", "Local training", "The method's hyper-parameters", "The run"
MACHINE = "The machine"

HYPER: dict[str, Option] = {
    "rho": Option(METHOD, "norm of the perturbation"),
    "alpha": Option(METHOD, "share of the local gradient (fedcm, mofedsam, fedlesam-m)"),
    "lam": Option(METHOD, "dynamic regulariser (feddyn, fedsmoo, fedlesam-d, freesam-d)"),
    "prox": Option(METHOD, "proximal pull (fedprox)"),
    "lr_g": Option(METHOD, "global learning rate of the server rule"),
}
"""The hyper-parameters with a flag of their own; `--set name=value` reaches the others."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run. `resolve` settles what is None, from the data set, the method and the machine."""

    algorithm: str = option("fedlesam", WHAT, "a method of `fedlesam list algorithms`, or module:callable")
    data: str = option("digits", WHAT, "a data set of `fedlesam list data`, folder:PATH or module:callable")
    task: str | None = option(
        None, WHAT, "classification, binary, regression, language_model, ... or module:callable (default: the first)"
    )
    metric: str | None = option(
        None, WHAT, "also measure, and rank by, a metric: module:callable, or a name such as f1; may be repeated"
    )
    data_dir: str | None = option(None, WHAT, "where the data set's files are", metavar="DIR")
    samples: int | None = option(None, WHAT, "train on this many samples, always the same ones")
    held_out: int | float | None = option(
        None, WHAT, "evaluate on training samples held out, not on the test data: 5000 or 10%", active_clients, "PART"
    )
    model: str = option("mlp", WHAT, "a network of `fedlesam list models`, or module:callable")
    split: str = option("dirichlet:0.1", WHAT, "how samples are divided, see `fedlesam list splits`")
    clients: int | None = option(None, WHAT, "number of clients (default: 40 on digits, else 100)")
    active: int | float = option(0.1, WHAT, "clients per round: 10 is a count, 0.1 or 10% a share", active_clients, "K")
    rounds: int = option(100, WHAT, "communication rounds", metavar="T")
    lr: float | str = option(0.1, LOCAL, "local learning rate, or a schedule: 0.1,cosine:100", kinds.rate, "LR")
    lr_decay: float | None = option(
        None,
        LOCAL,
        "factor of a learning rate that is a number, after each round; 1: none (default: the method's, usually 0.998)",
    )
    epochs: int | float | str | None = option(
        None, LOCAL, "local epochs, 0.5 or a range 1-5 (default: 5; cifar100: 2; texts, writers: 1)", epoch_range
    )
    steps: int | None = option(None, LOCAL, "local steps instead of epochs", metavar="K")
    optimizer: Optimizer = option(
        "sgd", LOCAL, "the optimizer of local steps; adamw works with methods that do not assume sgd"
    )
    batch_size: int | None = option(
        None, LOCAL, "samples per step (default: 50; digits: 10; cifar100, texts, writers: 20; domains: 32)"
    )
    weight_decay: float = option(1e-3, LOCAL, "L2 regularisation of the weights")
    clip: float = option(10.0, LOCAL, "clip gradients to this norm; 0 never clips")
    clip_scope: ClipScope = option("loss", LOCAL, "clip the loss gradient, or the gradient corrected by the method")
    momentum: float = option(0.0, LOCAL, "heavy-ball momentum inside a round")
    augment: bool = option(True, LOCAL, "the data set's augmentation, if it has one")
    hyper: Mapping[str, Value] = field(default_factory=dict)
    """The method's hyper-parameters that differ from their defaults, by name."""
    sampling: str | None = option(None, RUN, "module:callable that draws the clients of a round", metavar="NAME")
    stop_when: str | None = option(None, RUN, "end early, e.g. 'accuracy>=0.9' or 'loss<0.5'", metavar="RULE")
    patience: int | None = option(
        None, RUN, "end after N evaluations in which the first metric did not improve", metavar="N"
    )
    weighting: Weighting = option("clients", RUN, "average over clients, or by their examples")
    evaluate_every: int = option(1, RUN, "rounds between two evaluations; the last round is always evaluated")
    client_test: float | None = option(
        None,
        RUN,
        "test every client on a share of its own samples, such as 20%; it does not train on them",
        kinds.share,
    )
    per_client: bool = option(False, RUN, "also measure accuracy weighted by every client's class proportions")
    dropout: float = option(0.0, RUN, "probability that an active client never answers", metavar="P")
    max_update_norm: float = option(0.0, RUN, "drop updates with a larger norm; 0 never does", metavar="NORM")
    on_client_error: OnError = option(
        "drop", RUN, "if a client raises an error or its numbers are not finite: drop it, or stop"
    )
    seed: int = option(0, RUN, "the same seed and threads give the same bits")
    precision: Precision = option(
        "fp32", RUN, "precision of forward and backward passes: fp32, tf32 (GPU), bf16 by autocast, or bf16-pure"
    )
    engine: Engine = option(
        "plain", RUN, "plain, or stacked: train clients of a small model as one computation (one worker only)"
    )
    stack_runs: int | None = option(
        None,
        RUN,
        "train runs that differ only in seed or numbers as one computation with ROWS clients",
        metavar="ROWS",
    )
    compile: bool = option(False, RUN, "torch.compile the model; with --engine stacked the whole step")
    threads: int | None = option(
        None,
        RUN,
        "CPU threads per worker (default: PyTorch's choice, 1 with several workers; a resumed run keeps its number)",
    )
    workers: int = option(1, MACHINE, "processes that train clients side by side; the results do not change")
    memory: int = option(4 * 10**9, MACHINE, "clients' memory kept in RAM, the rest in files", byte_size, "SIZE")
    store: StoreKind = option("shared", MACHINE, "memory with several workers: shared (files) or pinned (to a worker)")
    probe: str | None = option(
        None, RUN, "measure while training: sharpness, hessian, drift or estimate[:every=N,...]; may be repeated"
    )
    checkpoint_every: int | str = option(
        "300s", MACHINE, "rounds (10) or time (300s, 5min) between checkpoints", kinds.interval, "EVERY"
    )
    keep: int = option(2, MACHINE, "number of checkpoints to keep; an older one is used if the newest is damaged")
    keep_last: bool = option(
        True,
        MACHINE,
        "keep the last checkpoint of a finished run, so that more --rounds can extend it; --no-keep deletes it",
    )
    lost_after: float = option(
        60.0,
        MACHINE,
        "end the run if one of its processes is stopped or silent for this long; 0: never",
        metavar="SECONDS",
    )
    cuda_graphs: bool = option(True, MACHINE, "on a GPU, record steps once and replay them, if the model allows it")
    device: str = option("auto", MACHINE, "auto, cpu, cuda or cuda:i")


OPTIONS: dict[str, Option] = {f.name: kinds.option_of(f) for f in fields(RunConfig) if "group" in f.metadata}
SHARES = tuple(name for name, known in OPTIONS.items() if known.kind is active_clients)
"""Settings of which a whole number is a count and a fraction a share: 1 is one client, 1.0 all of them."""
RANGES: dict[str, Range] = {
    **choices.RANGES,
    **dict.fromkeys(
        ("samples", "clients", "rounds", "evaluate_every", "keep", "steps", "patience"), Range(at_least=1, whole=True)
    ),
    "seed": {"at_least": 0, "whole": True},
    "lost_after": {"at_least": 0},
}

PROTOCOL: dict[str, dict[str, Value]] = {
    "digits": {"clients": 40, "epochs": 5, "batch_size": 10},
    "cifar10": {"clients": 100, "epochs": 5, "batch_size": 50},
    "cifar100": {"clients": 100, "epochs": 2, "batch_size": 20},
    "domains": {"epochs": 5, "batch_size": 32},
    "files": {"clients": 100, "epochs": 1, "batch_size": 20},
}
"""Defaults by data set; CIFAR's and those of data with domains are the paper's. Other data sets take cifar10's."""

OWN_CLIENTS = ("pooled", "leave-out", "natural", "by", "file")
"""Splits that bring their own number of clients."""

NO_MATTER = (
    "data_dir",
    "workers",
    "memory",
    "store",
    "checkpoint_every",
    "keep",
    "keep_last",
    "probe",
    "lost_after",
    "cuda_graphs",
)
"""Settings that change where and how fast a run is done, not what comes out."""

METRICS = "metrics_given"
"""Among the hyper-parameters of a run from Python: the fingerprint of its metrics, on which no weight depends."""

NEWER: dict[str, Value] = {"optimizer": "sgd"}
"""Settings with the values that older runs had without naming them: they leave names and fingerprints as they were."""


def data_settings(config: RunConfig) -> tuple[object, ...]:
    """The settings that the loaded data depends on.

    Args:
        config: Settings of a run.
    """
    return config.data, config.data_dir, config.samples, config.held_out


def parse(name: str, value: str, where: str) -> Value:
    """A value typed by a user for a field or hyper-parameter.

    Args:
        name: Of a field of RunConfig, or of a hyper-parameter.
        value: What was typed.
        where: The flag or the place in a file, for the error.
    """
    known = OPTIONS.get(name) or HYPER.get(name)
    if known is None:
        return _guess(value)
    try:
        found = known.kind(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{where}: expected {KINDS[known.kind][0]}, got {value!r}") from None
    if known.choices and found not in known.choices:
        raise ValueError(f"{where}: expected one of {', '.join(map(repr, known.choices))}, got {value!r}")
    check_setting(where, name, found)
    return found


def check_setting(where: str, name: str, value: Any) -> None:
    """A ValueError unless a setting is in its range.

    Args:
        where: The flag or the place in a file, for the error.
        name: Of a field of RunConfig.
        value: Its value.
    """
    if name in RANGES:
        check_range(where, name, value, RANGES[name])
    elif name == "checkpoint_every" and not (seconds_of(value) if isinstance(value, str) else 0 < value < 2**63):
        raise ValueError(f"{where}: {name} must be at least a round or some time, got {value}")


def check(config: RunConfig) -> None:
    """A ValueError unless every setting is one of its choices and in its range.

    What the library's own objects check (LocalTraining, Federation, splits) is not checked here.

    Args:
        config: Settings of a run.
    """
    check_params(config)
    for name in OPTIONS:
        if (value := getattr(config, name)) is not None:
            check_setting("RunConfig", name, value)


def _guess(value: str) -> Value:
    for kind in (int, float, kinds.switch):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


OWN = "hyper."
"""Before a hyper-parameter that has the name of a setting, such as dp-fedsam's clip."""


def update(config: RunConfig, values: Mapping[str, Value | None]) -> RunConfig:
    """`config` with the values that are not None; names that are no field are hyper-parameters of the method.

    Args:
        config: Settings of a run.
        values: By the names of fields and of hyper-parameters.
    """
    given = {name: value for name, value in values.items() if value is not None}
    known: dict[str, Any] = {name: value for name, value in given.items() if name in OPTIONS}
    hyper = {name.removeprefix(OWN): value for name, value in given.items() if name not in OPTIONS}
    hyper = {**config.hyper, **hyper}
    return dataclasses.replace(config, **known, hyper=hyper)


def settle_data(config: RunConfig) -> RunConfig:
    """What follows from the data set and the split, where it was not given.

    Args:
        config: Settings of a run.
    """
    name = "domains" if is_domains(config.data) else "files" if is_files(config.data) else config.data
    settled: dict[str, Any] = dict(PROTOCOL.get(name, PROTOCOL["cifar10"]))
    if config.split.partition(":")[0] in OWN_CLIENTS:
        settled.pop("clients", None)
    if config.steps is not None:
        settled.pop("epochs")
    return dataclasses.replace(config, **{k: v for k, v in settled.items() if getattr(config, k) is None})


def resolve(config: RunConfig) -> RunConfig:
    """Every None settled, so that the written config reproduces the run anywhere.

    Args:
        config: Settings as they were given.
    """
    import torch

    from fedlesam import algorithms

    algorithm = algorithms.get(config.algorithm, **config.hyper)
    takes = algorithms.hyperparameters(config.algorithm)
    defaults = {name: value for name, value in takes.items() if isinstance(value, int | float | str)}
    single = config.workers > 1 or config.stack_runs is not None
    return dataclasses.replace(
        settle_data(config),
        task=None if config.task == "classification" else config.task,
        lr_decay=algorithm.lr_decay if config.lr_decay is None and not isinstance(config.lr, str) else config.lr_decay,
        engine="stacked" if config.stack_runs is not None else config.engine,
        device=config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu",
        threads=config.threads if config.threads is not None else 1 if single else torch.get_num_threads(),
        hyper={**defaults, **config.hyper},
    )


def as_table(config: RunConfig) -> dict[str, Any]:
    """What JSON and TOML can hold; `RunConfig(**table)` is the config again.

    Args:
        config: The settings.
    """
    known = ((name, value) for name, value in vars(config).items() if value is not None)
    table = {name: value.item() if hasattr(value, "item") else value for name, value in known}  # NumPy's numbers
    return {**table, "hyper": dict(config.hyper)}


def write(config: RunConfig) -> str:
    """The config as TOML; the first line is the command that runs it again.

    Args:
        config: Resolved settings.
    """
    import tomli_w

    return f"# fedlesam run --config config.toml --out NEW_FOLDER\n{tomli_w.dumps(as_table(config))}"


def differences(config: RunConfig, other: RunConfig) -> list[str]:
    """What makes two runs different ones.

    Args:
        config: Resolved settings.
        other: Those of the other run.
    """
    return changes(_flat(config), _flat(other))


def changes(given: Mapping[str, Value], known: Mapping[str, Value]) -> list[str]:
    """Where two tables differ, in words.

    Args:
        given: What the user gave.
        known: What the run folder has.
    """
    return [
        one_line(f"{name}: you gave {given.get(name, 'none')}, the folder has {known.get(name, 'none')}")
        for name in dict.fromkeys([*given, *known])
        if given.get(name) != known.get(name) or (name in SHARES and type(given.get(name)) is not type(known.get(name)))
    ]


def settings_of(config: RunConfig) -> tuple[str, str]:
    """What checkpoints know of the settings: whatever the number of rounds; and what older ones know.

    Args:
        config: Resolved settings.
    """
    return fingerprint(dataclasses.replace(config, rounds=1)), fingerprint(config)


def identity(config: RunConfig) -> str:
    """A short name for what the run computes, the same for the same settings.

    Args:
        config: Resolved settings.
    """
    return fingerprint(dataclasses.replace(config, threads=None))[:8]


def fingerprint(config: RunConfig) -> str:
    """The same for runs with the same bits.

    Args:
        config: Resolved settings.
    """
    return hashlib.sha256(json.dumps(_flat(config), sort_keys=True).encode()).hexdigest()


def _flat(config: RunConfig) -> dict[str, Value]:
    table = as_table(config)
    hyper = {name: value for name, value in table.pop("hyper").items() if name != METRICS}
    for name, value in NEWER.items():
        if table.get(name) == value:
            del table[name]
    return {**{name: value for name, value in table.items() if name not in NO_MATTER}, **hyper}

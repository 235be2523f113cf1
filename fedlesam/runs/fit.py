"""`Federation.fit`: anything that is made in Python as a run, with the folder of the command line's runs."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlesam.core.checks import check_count
from fedlesam.core.evaluation import PerClient
from fedlesam.federation import Federation, Record
from fedlesam.runs import config as configs
from fedlesam.runs import stopping
from fedlesam.runs.checkpoint import Checkpoints
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.given import config_of, data_fingerprint
from fedlesam.runs.progress import Display
from fedlesam.runs.reopen import at_model
from fedlesam.runs.runner import Made, execute
from fedlesam.runs.trackers import wanted, watching

log = logging.getLogger("fedlesam")

Callback = Callable[[Record], object]


def fit(
    federation: Federation,
    rounds: int,
    out: str | Path | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    stop_when: str | None = None,
    patience: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    checkpoint_every: int | str = "300s",
    keep_last: bool = True,
    probe: str | None = None,
    tensorboard: str | None = None,
    mlflow: str | None = None,
    wandb: bool = False,
) -> list[Record]:
    """Train a federation up to so many rounds, and return the records of all of them.

    Args:
        federation: The federation; one that has not trained yet, or whose rounds are in the folder.
        rounds: In total.
        out: The run folder; None writes nothing.
        callbacks: Called with the record of every new round; what one raises ends the run, which can be resumed.
        stop_when: End early, e.g. "accuracy>=0.9".
        patience: End after so many evaluations without a better first metric.
        name: What the folder calls the method; by default its name in the catalogue.
        overwrite: Start again, and replace what the folder holds.
        progress: Whether to show it.
        checkpoint_every: Rounds (10) or time ("300s") between checkpoints.
        keep_last: Keep the last checkpoint of a finished run: a call with more rounds resumes from it.
        probe: Measure while training, as `--probe`.
        tensorboard: A folder, or "" for the run's own.
        mlflow: The address of a server.
        wandb: Whether to use Weights & Biases.
    """
    check_count("fit", "rounds", rounds)
    rounds, callbacks = int(rounds), _check_callbacks(callbacks)
    display, label = Display(not progress), name or federation.name or "python"
    run: dict[str, Any] = {"rounds": rounds, "stop_when": stop_when, "patience": patience, "probe": probe}
    run |= {"checkpoint_every": checkpoint_every, "keep_last": keep_last}
    config = RunConfig(**run) if out is None else config_of(federation, label, **run)
    configs.check(config)
    federation.local.check(federation.algorithm, rounds)
    stopping.check(stop_when, patience, list(federation.task.metrics), federation.tested)
    openers = wanted(tensorboard, mlflow, wandb)
    if out is None and (openers or probe):
        raise ValueError("fit: trackers and probes write files, so they need a run folder; give out=FOLDER")
    folder = None if out is None else RunFolder(Path(out))
    if folder is not None:
        _check_begun(federation, folder, overwrite)
        if not overwrite:
            _check_metrics(config, folder)
    with display.open(None if folder is None else folder.path, "call", overwrite), watching(openers) as watchers:
        show = display.watch(label, rounds)

        def see(record: Record) -> None:
            show(record)
            for callback in callbacks:
                callback(record)
                if federation.state.round != record.round + 1:
                    raise ValueError(
                        f"fit: a callback has trained the federation to round {federation.state.round}; fit does that, "
                        "and a callback only looks at the record"
                    )

        if folder is None:
            log.info(
                "%s: %d rounds to train; the next line comes after the first",
                label,
                rounds,
                extra={"without_bar": True},
            )
            _train(federation, config, see)
        else:
            watch = watchers.watch(config, folder.path, see) if openers else see
            made = Made(federation, data_fingerprint(federation), {"split": {"hash": data_fingerprint(federation)}})
            execute(config, folder.path, overwrite=overwrite, watch=watch, made=made)
            _take_up(federation, folder, config, made)
    return federation.history


def _check_callbacks(given: Any) -> list[Callback]:
    found: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    for one in found:
        if not callable(one):
            raise ValueError(f"fit: callbacks must be a list of functions of a record, e.g. [print], got {given!r}")
    return found


def _check_begun(federation: Federation, folder: RunFolder, overwrite: bool) -> None:
    kept = not folder.is_empty() and (folder.checkpoints.exists() or folder.is_finished())
    if federation.state.round and (overwrite or not kept):
        raise ValueError(
            f"{folder.path}: the federation has already trained {federation.state.round} rounds that are not in this "
            "folder; make it again, and give the folder from the first round on"
        )


def _check_metrics(config: RunConfig, folder: RunFolder) -> None:
    """Who mends a metric goes on where the run ended; what is finished was measured by another one."""
    if not folder.config.exists():
        return
    known = replace(folder.read_config(), rounds=config.rounds)
    given, kept = config.hyper[configs.METRICS], known.hyper.get(configs.METRICS)
    if kept in (None, given) or configs.differences(config, known):  # which are said later
        return
    if folder.is_finished():
        raise ValueError(
            f"{folder.path}: holds another run ({configs.METRICS}: you gave {given}, the folder has {kept}); choose "
            "another folder, or replace it with overwrite=True"
        )
    log.warning("%s: the code of its metrics has changed; values of earlier rounds stay as they are", folder.path)


def _train(federation: Federation, config: RunConfig, see: Callback) -> None:
    """Without a folder."""

    def ended() -> str:
        records = [record.as_dict() for record in federation.history] if config.stop_when or config.patience else []
        return stopping.why_end(records, config.stop_when, config.patience, *stopping.first_of(federation.task.metrics))

    while federation.state.round < config.rounds and not ended():
        last = federation.state.round + 1 == config.rounds
        see(federation.round(evaluate=True if last else None))


def _take_up(federation: Federation, folder: RunFolder, config: RunConfig, made: Made) -> None:
    """The records of the folder; and its state, where the run was finished before."""
    records = folder.read_metrics()
    if federation.state.round != len(records):
        settings, older = configs.settings_of(config)
        metadata = made.metadata(settings)
        if not Checkpoints(folder.checkpoints, metadata=metadata, older=older).read_newest(federation, memories=True):
            at_model(folder, federation)
    federation.history[:] = [record_of(record) for record in records]


def record_of(record: dict[str, Any]) -> Record:
    """A record from a line of metrics.jsonl.

    Args:
        record: By the names of a Record.
    """
    empty = {"train_loss": float("nan"), "divergence": float("nan"), "test_loss": None, "test_accuracy": None}
    found = {**empty, **record}
    if "per_client" in found:
        found["per_client"] = PerClient.of_dict(found["per_client"])
    if "test_clients" in found:
        found["test_clients"] = {name: PerClient.of_dict(parts) for name, parts in found["test_clients"].items()}
    if "dropped" in found:
        found["dropped"] = {int(client): why for client, why in found["dropped"].items()}
    if found["test_accuracy"] is not None:
        found.setdefault("metrics", {"accuracy": found["test_accuracy"]})
    return Record(**{name: value for name, value in found.items() if name in Record.__dataclass_fields__})

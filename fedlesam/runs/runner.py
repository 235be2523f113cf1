"""One run from its settings to its folder."""

import contextlib
import dataclasses
import hashlib
import logging
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedlesam.core import disk
from fedlesam.core.saving import check_savable
from fedlesam.data.dataset import DataSet
from fedlesam.engines.distributed import shutdown_workers
from fedlesam.engines.signals import handle_signals
from fedlesam.engines.stack import Stack
from fedlesam.engines.watch import check_lost_after
from fedlesam.engines.world import WorkerLost, World
from fedlesam.federation import DROPOUT, Federation, Record, count_active
from fedlesam.probes import during
from fedlesam.probes.base import Probe
from fedlesam.probes.catalogue import attach
from fedlesam.runs import config as configs
from fedlesam.runs import costs, stopping
from fedlesam.runs.build import Experiment, build
from fedlesam.runs.checkpoint import Checkpoints
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import NAMES, SCORES, evaluated_on, named, plain, scores, scores_of
from fedlesam.runs.folder import RunFolder, State, default_folder
from fedlesam.runs.journal import Journal
from fedlesam.runs.kinds import seconds_of
from fedlesam.runs.lock import locked
from fedlesam.runs.overview import size_of

Watch = Callable[[Record], None]

log = logging.getLogger("fedlesam")


@dataclasses.dataclass(frozen=True)
class Made:
    """A federation that is ready to train, and what its run folder says of the data."""

    federation: Federation
    """As it is before its first round."""
    data: str
    """The fingerprint of the data and how they are divided."""
    facts: dict[str, Any]
    """For the summary."""
    write: Callable[[RunFolder], None] = lambda folder: None
    """Writes the split."""
    samples: str = ""
    """The fingerprint of the samples, where it is not part of `data`."""

    def metadata(self, settings: str) -> dict[str, str]:
        """What a checkpoint must have been made with.

        Args:
            settings: Their fingerprint.
        """
        return {"settings": settings, "split": self.data, **({"data": self.samples} if self.samples else {})}


def made_of(experiment: Experiment) -> Made:
    """What the runner needs of an experiment.

    Args:
        experiment: As of `build`.
    """
    split, data = experiment.split, experiment.data
    facts = {
        "shape" if len(data.shape) == 3 else "sample_shape": list(data.shape),
        "classes": data.outputs,
        **({"vocabulary": data.tokens} if data.tokens else {}),
        "split": {name: getattr(split, name) for name in ("scheme", "hash", "dropped", "repeats")}
        | {"data": (samples := hashlib.sha256(data.fingerprint.encode()).hexdigest()[:12])},
    }
    return Made(experiment.federation, split.hash, facts, lambda folder: folder.write_split(split, data), samples)


class NoAnswers(ArithmeticError):
    """Not one client was ever part of a round."""


def settle(config: RunConfig, folder: Path | None = None) -> tuple[RunConfig, Path]:
    """Resolve the settings and name the folder; threads that were not given stay what the folder's run began with.

    Args:
        config: Settings, not resolved.
        folder: Where the run goes; None names it after the settings.
    """
    given = config.threads
    config = configs.resolve(config)
    folder = folder or default_folder(config)
    if given is None and RunFolder(folder).config.exists():
        config = dataclasses.replace(config, threads=RunFolder(folder).read_config().threads)
    return config, folder


def notes(config: RunConfig, world: World | None = None) -> list[str]:
    """What a user should know before the run starts.

    Args:
        config: Resolved settings.
        world: The processes that torchrun started, if it did.
    """
    workers, found = world.size if world is not None else config.workers, []
    if workers > 1:
        found.append(f"{workers} workers, {config.threads} thread{'s' if config.threads != 1 else ''} each")
    if config.clients is not None and workers > (active := count_active(config.active, config.clients)):
        found.append(f"only {active} clients are active a round: workers are idle")
    if config.precision == "tf32" and config.device == "cpu":
        found.append("precision tf32 is for GPUs: on most CPUs it has no effect")
    return found


def execute(
    config: RunConfig,
    path: Path,
    *,
    overwrite: bool = False,
    watch: Watch | None = None,
    data: DataSet | None = None,
    world: World | None = None,
    stack: Stack | None = None,
    made: Made | None = None,
) -> dict[str, Any]:
    """Train a resolved config into a folder and return its summary; a finished folder is only read.

    An unfinished one resumes at its last checkpoint. All settings are checked before the folder is touched.
    Ctrl-C, SIGTERM and errors end the run with everything up to the last good round in the folder, and are raised
    again. In a `world` of several processes the leader does all of this, and the others `run_worker`.

    Args:
        config: Resolved settings.
        path: The run folder.
        overwrite: Whether to replace what the folder holds.
        watch: Called with the record of every round.
        data: The data set, if it is loaded already.
        world: The processes that torchrun started, if it did.
        stack: What the run shares with others of a sweep, which trains them in lockstep.
        made: The federation, if it is made already; it stays open.
    """
    folder, tell = RunFolder(path), None
    with contextlib.ExitStack() as held:
        with release_workers_on_error(world):
            if world is not None:
                world.set_lost_after(check_lost_after("run", config.lost_after))
                world.broadcast({"command": "build", "config": configs.as_table(config), "folder": str(path.resolve())})
            todo = folder.needs_run(config, overwrite)
            if path.exists() and (todo or folder.has_leftovers()):
                tell = held.enter_context(locked(path))
                todo = folder.needs_run(config, overwrite)  # who held it may have finished it
                folder.remove_memory()
            if not todo:
                if world is not None:
                    shutdown_workers(world)
                if tell is not None:
                    disk.sync_folder(path)  # that it is finished may not be lasting yet
                    if not folder.read_config().keep_last:
                        folder.remove_checkpoints()
                return _finished(folder)
            ready = made or made_of(build(config, data, folder=folder.memory, world=world, stack=stack))
            federation = ready.federation
            check_savable(federation.model)
            probes = attach(config.probe, federation)
            stopping.check(config.stop_when, config.patience, list(federation.task.metrics), federation.tested)
            costs.check_fits(costs.predict(config, federation), config, path, size_of(folder.checkpoints))
            if world is not None:
                world.broadcast({"command": "ready?"})
                wrong = [message for message, _ in world.gather(None) if message]
                if wrong:
                    raise ValueError(wrong[0])
            if tell is None:
                try:
                    disk.make_folder(path)
                except OSError as error:
                    raise OSError(
                        f"{path}: cannot be made: {error.strerror}; choose another folder with --out"
                    ) from error
                tell = held.enter_context(locked(path))
                if not folder.is_empty():
                    raise ValueError(f"{path}: another process has just begun a run here; repeat the command")
        if made is None:
            held.enter_context(federation)
        with release_workers_on_error(world):
            if overwrite:
                folder.clear()
            checkpoints, records = _begin(folder, config, ready)
            held.callback(checkpoints.journals[folder.metrics.name].close)
            tell(federation.state.round)
        left, name = config.rounds - federation.state.round, f"{config.algorithm}, seed {config.seed}"
        text = f"{name}: {left} rounds to train; the next line comes after the first"
        log.info(text, extra={"without_bar": True})
        return _train(folder, config, ready, checkpoints, records, watch, probes)


def _finished(folder: RunFolder) -> dict[str, Any]:
    """The summary of a run that is done, whoever wrote it."""
    summary = folder.read_summary()
    found = scores_of(summary, folder.read_metrics())
    known = {
        name: {k: v for k, v in summary[name].items() if k in found or k in NAMES} for name in SCORES if name in summary
    }
    return {**summary, **known}


def _begin(folder: RunFolder, config: RunConfig, made: Made) -> tuple[Checkpoints, list[dict[str, Any]]]:
    """Write what a new run begins with, or resume where an old one stopped; return the records so far."""
    for part in folder.path.glob(f".*{disk.PART}"):  # of a process that was killed
        part.unlink(missing_ok=True)
    new = not folder.config.exists()
    if new:
        folder.write_config(config)
    journal = Journal(folder.metrics)
    settings, older = configs.settings_of(config)
    journals = {folder.metrics.name: journal}
    checkpoints = Checkpoints(folder.checkpoints, config.keep, journals, made.metadata(settings), older)
    seen = folder.metrics.read_bytes().count(b"\n") if folder.metrics.exists() else 0
    done = checkpoints.load(made.federation)  # refuses those of another run; nothing of it has changed then
    folder.summary.unlink(missing_ok=True)
    if not new:
        folder.write_config(config)
    made.write(folder)
    folder.write_versions(done)
    if seen and not done:
        log.warning("%s: had no checkpoint yet, so its %d rounds are trained again", folder.path, seen)
    if done:
        log.info("%s: resuming after round %d of %d", folder.path, done, config.rounds)
    return checkpoints, [plain(record) for record in checkpoints.records[folder.metrics.name]]


def _train(
    folder: RunFolder,
    config: RunConfig,
    made: Made,
    checkpoints: Checkpoints,
    records: list[dict[str, Any]],
    watch: Watch | None,
    probes: list[Probe],
) -> dict[str, Any]:
    federation, journal = made.federation, checkpoints.journals[folder.metrics.name]
    watched = during.Watch(federation, probes, folder.probes, checkpoints.previous)
    every, saved = config.checkpoint_every, time.monotonic()

    def why() -> str:
        return stopping.why_end(records, config.stop_when, config.patience, *stopping.first_of(federation.task.metrics))

    with handle_signals(federation.request_stop):  # also while the end is written: who lost a peer is soon told to go
        try:
            for record in watched.train(config.rounds, why):
                journal.append(named(record.as_dict(), evaluated_on(config)))
                records.append(record.as_dict())
                if watch is not None:
                    watch(record)
                left = config.rounds - federation.state.round
                if left and _due(every, federation.state.round, time.monotonic() - saved):
                    checkpoints.save(federation, watched.to_keep)
                    saved = time.monotonic()
            _check_answers(records)
            journal.seal()
            if config.keep_last:
                checkpoints.keep = 1
                checkpoints.save(federation, watched.to_keep)
            summary = _close(folder, config, made, records, "finished", why())
        except BaseException as error:
            state: State = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"
            with _log_and_continue(folder, "the run will resume at the checkpoint before"):
                if len(records) == federation.state.round:
                    checkpoints.save(federation, watched.to_keep)
            with _log_and_continue(folder, "there is no summary"):
                _close(folder, config, made, records, state, str(error))
            raise
    federation.check_stop()  # who asked wants no next run either
    return summary


@contextlib.contextmanager
def _log_and_continue(folder: RunFolder, what: str) -> Iterator[None]:
    """While a run ends by an error, a second one must not hide the first."""
    try:
        yield
    except (OSError, ValueError, SafetensorError, WorkerLost) as error:
        log.warning("%s: %s (%s)", folder.path, what, error)


def _due(every: int | str, done: int, seconds: float) -> bool:
    between = seconds_of(every)
    return not done % int(every) if between is None else seconds >= between


def _check_answers(records: list[dict[str, Any]]) -> None:
    """Raise NoAnswers if all clients of all rounds were dropped."""
    if any("train_loss" in record for record in records):
        return
    dropped = (pair for record in records for pair in record.get("dropped", {}).items())
    failed = next((f"the first, client {client}: {why}" for client, why in dropped if why != DROPOUT), None)
    why = failed or "all of them dropped out: lower dropout, or train more rounds"
    raise NoAnswers(f"no client ever answered, so nothing was learnt; {why}")


@contextlib.contextmanager
def release_workers_on_error(world: World | None) -> Iterator[None]:
    """On an error let the others go, so that they wait for nothing.

    Args:
        world: The processes that torchrun started, if it did.
    """
    try:
        yield
    except BaseException:
        if world is not None:
            shutdown_workers(world)
        raise


def run_worker(world: World) -> None:
    """In a process that torchrun started beside the leader: work for it, with its settings.

    An error here is sent to the leader, which raises it.

    Args:
        world: The processes that torchrun started, if it did.
    """
    try:
        message = world.broadcast()[0]
        if message["command"] == "stop":
            return
        config = RunConfig(**message["config"])
        federation, wrong = None, None
        try:
            federation = build(config, folder=RunFolder(Path(message["folder"])).memory, world=world).federation
        except Exception as error:
            wrong = f"{platform.node()}, process {world.rank}: {error}"
        if world.broadcast()[0]["command"] == "stop":
            return
        world.gather(wrong)
        if federation is None:
            world.broadcast()
        else:
            with handle_signals(federation.request_stop):
                federation.worker_loop()
    finally:
        world.close()


def _close(
    folder: RunFolder, config: RunConfig, made: Made, records: list[dict[str, Any]], state: State, why: str
) -> dict[str, Any]:
    dropped = sum(len(record.get("dropped", ())) for record in records)
    summary = {
        "state": state,
        **({"why": why} if why else {}),
        "algorithm": config.algorithm,
        "rounds": len(records),
        **named(scores(records), evaluated_on(config)),
        **{name: sum(r[name] for r in records) for name in ("backward_passes", "bytes_down", "bytes_up", "seconds")},
        "parameters": len(made.federation.weights),
        **({"dropped": dropped} if dropped else {}),
        "client_memory_bytes": largest_memory(made.federation),
        **made.facts,
    }
    folder.write_end(made.federation.model, summary, config.keep_last)
    return summary


def largest_memory(federation: Federation) -> int:
    """The most a client holds between rounds, in bytes.

    Args:
        federation: The federation.
    """
    return max((federation.memories[client].nbytes for client in federation.memories), default=0)

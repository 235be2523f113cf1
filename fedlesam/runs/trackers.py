"""Live trackers: TensorBoard, MLflow and Weights & Biases watch the records of a run. None of them is a dependency."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedlesam.federation import Record
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import TEST, evaluated_on, named

PROJECT = "fedlesam"
"""The experiment of MLflow, the project of Weights & Biases."""


@dataclass(frozen=True)
class Tracked:
    """A run as a tracker knows it."""

    name: str
    """What the tracker calls it."""
    folder: Path
    """Its run folder."""
    settings: dict[str, Any]
    """Sent to the tracker, by name."""


class Tracker(Protocol):
    """Sees every round after it is done. It cannot change training: it gets numbers, and its errors end only itself."""

    def see(self, step: int, values: dict[str, float]) -> None:
        """A round is done.

        Args:
            step: Rounds done.
            values: Numbers by name.
        """

    def close(self) -> None:
        """The run has ended."""


Open = Callable[[Tracked, int], Tracker]
"""With the run, and the number of its first record: above 1 where a run resumes."""


class TensorBoard:
    """Event files, in the run's folder or below a folder of one's choice.

    Args:
        run: The run as a tracker knows it.
        first: The number of its first record; above 1 where it resumes.
        folder: Where they go; None is the run's folder.
    """

    def __init__(self, run: Tracked, first: int, folder: Path | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        where = folder / run.name if folder is not None else run.folder / "tensorboard"
        self.writer: Any = SummaryWriter(str(where), purge_step=first)
        self.writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in run.settings.items()))

    def see(self, step: int, values: dict[str, float]) -> None:
        """A round is done.

        Args:
            step: Rounds done.
            values: Numbers by name.
        """
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """The run has ended."""
        self.writer.close()


class MLflow:
    """Through a client of its own, so that a program's current MLflow run is left alone.

    Args:
        run: The run as a tracker knows it.
        first: The number of its first record; above 1 where it resumes.
        uri: The tracking server.
    """

    def __init__(self, run: Tracked, first: int, uri: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(uri)
        found = self.client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found is not None else self.client.create_experiment(PROJECT)
        self.run = self.client.create_run(experiment, run_name=run.name, tags={"folder": str(run.folder)}).info.run_id
        self.client.log_batch(self.run, params=[Param(name, str(value)) for name, value in run.settings.items()])

    def see(self, step: int, values: dict[str, float]) -> None:
        """A round is done.

        Args:
            step: Rounds done.
            values: Numbers by name.
        """
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        """The run has ended."""
        self.client.set_terminated(self.run)


class WeightsAndBiases:
    """With WANDB_MODE=offline it needs no account and no network: `wandb sync` sends the run later.

    Args:
        run: The run as a tracker knows it.
        first: The number of its first record; above 1 where it resumes.
    """

    def __init__(self, run: Tracked, first: int) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=PROJECT,
            name=run.name,
            dir=str(run.folder),
            config=run.settings,
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",
        )

    def see(self, step: int, values: dict[str, float]) -> None:
        """A round is done.

        Args:
            step: Rounds done.
            values: Numbers by name.
        """
        self.run.log(values, step=step)

    def close(self) -> None:
        """The run has ended."""
        self.run.finish()


def wanted(tensorboard: str | None = None, mlflow: str | None = None, wandb: bool = False) -> dict[str, Open]:
    """The trackers asked for, by their flag; one whose package is missing is refused before anything is trained.

    Args:
        tensorboard: A folder, "" for the run's own, or None.
        mlflow: The address of a server, or None.
        wandb: Whether to use Weights & Biases.
    """
    found: dict[str, Open] = {}
    if tensorboard is not None:
        found["tensorboard"] = partial(TensorBoard, folder=Path(tensorboard) if tensorboard else None)
    if mlflow is not None:
        found["mlflow"] = partial(MLflow, uri=mlflow)
    if wandb:
        found["wandb"] = WeightsAndBiases
    for extra in found:
        if importlib.util.find_spec(extra) is None:
            raise ValueError(f"--{extra} needs a package that is not installed: pip install 'fedlesam[{extra}]'")
    return {f"--{name}": opener for name, opener in found.items()}


class Watchers:
    """The trackers of one run after another; each opens at the run's first record, when its folder is there.

    Args:
        openers: By their flags, as of `wanted`.
        warn: Called with a sentence about a tracker that stopped.
    """

    def __init__(self, openers: dict[str, Open], warn: Callable[[str], None]) -> None:
        self.openers, self.warn = openers, warn
        self.live: dict[str, Tracker] = {}

    def watch(self, config: RunConfig, folder: Path, also: Callable[[Record], None] | None) -> Callable[[Record], None]:
        """The observer of a run; it also calls another one.

        Args:
            config: Resolved settings.
            folder: The run's folder.
            also: Called with every record, too.
        """
        self.close()
        table = configs.as_table(config)
        run = Tracked(folder.name, folder, {**table.pop("hyper"), **table})
        opened, on = False, evaluated_on(config)

        def see(record: Record) -> None:
            nonlocal opened
            if also is not None:
                also(record)
            if not opened:
                opened = True
                for flag, start in self.openers.items():
                    with self._or_without(flag):
                        self.live[flag] = start(run, record.round + 1)
            for flag, tracker in list(self.live.items()):
                with self._or_without(flag):
                    tracker.see(record.round + 1, numbers(record, on))

        return see

    def close(self) -> None:
        """Those of the run that has ended."""
        for flag, tracker in list(self.live.items()):
            with self._or_without(flag):
                tracker.close()
        self.live.clear()

    @contextmanager
    def _or_without(self, flag: str) -> Iterator[None]:
        """Hours of training do not end because a server of metrics does: it is logged once, and the run continues."""
        try:
            yield
        except Exception as error:
            self.live.pop(flag, None)
            self.warn(f"{flag} stopped, the run continues without it: {error}")


def watching(openers: dict[str, Open], warn: Callable[[str], None] | None = None) -> closing[Watchers]:
    """Trackers that are closed at the end of a `with`.

    Args:
        openers: By their flags, as of `wanted`.
        warn: Called with a sentence about a tracker that stopped; by default it goes to standard error.
    """
    return closing(Watchers(openers, warn or (lambda text: print(text, file=sys.stderr))))


def numbers(record: Record, on: str = TEST) -> dict[str, float]:
    """What a tracker plots: the numbers of a record, by the samples they are of; nested ones by their path.

    Args:
        record: A round.
        on: test, or held-out.
    """
    values = {name: value for name, value in named(record.as_dict(), on).items() if name != "round"}
    return dict(_numbers("", values))


def _numbers(path: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(f"{path}{name}/", value)
        elif isinstance(value, int | float):
            yield f"{path}{name}", float(value)

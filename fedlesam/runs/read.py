"""Finished or unfinished runs as the report sees them: what is in their folders and nothing else."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import Measure, evaluated_on, measure_of, scores, scores_of, summary_measure, value_of
from fedlesam.runs.folder import RunFolder, find_folders
from fedlesam.runs.methods import is_centralised, method_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from fedlesam.federation import Federation
    from fedlesam.probes.readings import Reading, Surface


@dataclass(frozen=True)
class Run:
    """A run in its folder: settings, records, summary, and what was measured."""

    path: Path
    """The run folder."""
    config: RunConfig
    """Its settings."""
    summary: dict[str, Any]
    """What summary.json holds; empty where there is none yet."""
    records: list[dict[str, Any]]
    """One for each round done, as in metrics.jsonl."""

    def __repr__(self) -> str:
        done, state = len(self.records), "finished" if self.finished else "not finished"
        reached = self.scores.get("last")
        last = (
            ""
            if reached is None
            else f"; {self.evaluated_on} {self.measure.title} {self.measure.show(reached)}{self.measure.unit}"
        )
        return f"Run({self.method} in {self.path}; {state}, {done} of {self.config.rounds} rounds{last})"

    @property
    def algorithm(self) -> str:
        """The method's name in the settings."""
        return self.config.algorithm

    @property
    def method(self) -> str:
        """For readers: training with all data in one place is not called by a federated method's name."""
        return method_name(self.config.algorithm, self.config.split)

    @property
    def centralised(self) -> bool:
        """Trained with all data in one place."""
        return is_centralised(self.method)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Rounds done and values, of the rounds that have one.

        Args:
            name: Of a number of a record, or of a metric.
        """
        points = [(r["round"] + 1, value) for r in self.records if (value := value_of(r, name)) is not None]
        return [x for x, _ in points], [y for _, y in points]

    def total(self, name: str) -> float:
        """The sum of a number over all rounds.

        Args:
            name: Of a number of a record.
        """
        try:
            return float(sum(r[name] for r in self.records))
        except KeyError as error:
            raise ValueError(f"{RunFolder(self.path).metrics}: a round has no {error}") from error

    @cached_property
    def measure(self) -> Measure:
        """What it is ranked by."""
        return measure_of(self.records) if self.records else summary_measure(self.summary)

    @cached_property
    def scores(self) -> dict[str, float]:
        """`last`, `mean_of_last` and `best` of its measure; of a run under way, or killed, by its records so far."""
        return scores_of(scores(self.records) if not self.summary and self.records else self.summary, self.records)

    @property
    def accuracy(self) -> dict[str, float]:
        """The scores of a run that is ranked by accuracy; empty of another."""
        return self.scores if self.measure.name == "accuracy" else {}

    @property
    def evaluated_on(self) -> str:
        """test, or held-out."""
        return evaluated_on(self.config)

    @property
    def finished(self) -> bool:
        """All of its rounds are done."""
        return self.summary.get("state") == "finished"

    @cached_property
    def versions(self) -> dict[str, str]:
        """Empty where the folder does not say."""
        return RunFolder(self.path).read_versions()

    def class_counts(self) -> "NDArray[np.int64] | None":
        """Clients x classes, or None where the folder has no split."""
        return RunFolder(self.path).read_class_counts()

    @cached_property
    def measurements(self) -> "list[Reading]":
        """What probes found, in the order of rounds."""
        return RunFolder(self.path).read_readings()

    @property
    def probes(self) -> list[str]:
        """Those that read something."""
        return list(dict.fromkeys(one.probe for one in self.measurements if one.values))

    def series(self, probe: str) -> "list[Reading]":
        """Of the way in which it was measured most often: a final model measured again is no point of a curve.

        Args:
            probe: Its name.
        """
        ways: dict[str, list[Reading]] = {}
        for one in self.measurements:
            if one.probe == probe and one.values:
                ways.setdefault(json.dumps(one.metadata, sort_keys=True), []).append(one)
        return max(ways.values(), key=len, default=[])

    def surface(self, dims: int) -> "Surface | None":
        """The loss surface of one or two dimensions; None where none was measured.

        Args:
            dims: 1 or 2.
        """
        return RunFolder(self.path).read_surface(dims)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A record per round, by the names of `Record`; `pandas.DataFrame(run.history)` is a table of them."""
        return self.records

    @cached_property
    def model(self) -> "nn.Module":
        """The trained module on the CPU, in eval mode: of the end of the run, or of its last checkpoint.

        Needs the run's data set only where the folder does not say for what inputs the module is: of a run that is
        under way or was killed, and of folders of older versions.
        """
        known = self.summary.get("shape") or self.summary.get("sample_shape")
        if known is None or "classes" not in self.summary:
            return self.federation(device="cpu").model
        from fedlesam.models.catalogue import make_model

        shape, classes = tuple(known), self.summary["classes"]
        module = make_model(self.config.model, shape, classes, self.config.seed, self.summary.get("vocabulary", 0))
        RunFolder(self.path).load_model(module)
        return module.eval()

    def federation(self, data_dir: str | None = None, device: str | None = None) -> "Federation":
        """The run's clients, method and global model; clients' memories are not in it.

        Args:
            data_dir: Where the files of the data set are, if not where the run found them.
            device: `cpu`, `cuda` or `cuda:i`, if not that of the run.
        """
        from fedlesam.runs.reopen import open_run, read_config

        return open_run(self.path, read_config(self.path, data_dir, device))


def read_run(path: Path | str) -> Run:
    """What a run folder holds: `config`, `history`, `scores`, `model`. `fedlesam.load_run` is the same function.

    Args:
        path: A run folder.

    Raises:
        ValueError: It is not a run folder, or a file in it is damaged.
    """
    folder = RunFolder(Path(path))
    return Run(folder.path, folder.read_config(), folder.read_summary(), folder.read_metrics())


load_run = read_run


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in run folders, and in folders of run folders, each once.

    Args:
        paths: Run folders, or folders that hold some.
    """
    return [read_run(folder.path) for folder in find_folders(paths)]

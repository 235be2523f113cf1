"""Train a small network from scratch: a line a run."""

from pathlib import Path
from typing import ClassVar

from fedlesam import data
from fedlesam.data.dataset import DataSet
from fedlesam.engines.settings import Execution
from reproduction.heads_run import Runner
from reproduction.scratch import NAME


def load(data_dir: Path | None, smoke: bool = False, of: str = "fashion-mnist") -> DataSet:
    """The pictures; embedded digits in their place, to see that it runs."""
    return data.load("digits") if smoke else data.load(of, data_dir)


class ScratchRunner(Runner):
    """Trains convolutions, which gain nothing from being stacked."""

    study: ClassVar[str] = NAME
    execution: ClassVar[Execution] = Execution(threads=1)

"""A run folder, and what is done with many: queues of runs, tuning, statistics over seeds. Imports no PyTorch."""

from fedlesam.runs.folder import RunFolder, State
from fedlesam.runs.versions import versions

__all__ = ["RunFolder", "State", "versions"]

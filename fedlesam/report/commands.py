"""The command that makes a run again."""

import shlex

from fedlesam.runs.config import HYPER, OPTIONS, RunConfig
from fedlesam.runs.kinds import KINDS

BY_THE_MACHINE = ("workers", "memory", "store", "lost_after")
"""Change nothing in the numbers."""


def command(config: RunConfig) -> str:
    """The command that repeats a run: all settings that are not defaults, as flags. It needs no file of the run.

    Args:
        config: The settings of the run.
    """
    words = ["fedlesam", "run"]
    default = RunConfig()
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        if value is None or name in BY_THE_MACHINE or (value == getattr(default, name) and name != "algorithm"):
            continue
        flag = name.replace("_", "-")
        if KINDS[option.kind][1] == (bool,):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    for name, value in config.hyper.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if name in HYPER else ["--set", f"{name}={value}"]
    return shlex.join(words)

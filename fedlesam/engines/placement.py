"""Where the worker processes of one machine compute, and how they are started."""

import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Placement:
    """How start_local starts its processes.

    Args:
        method: fork or spawn.
        gpus: of each process, by the number this process knows it by; None where they compute on the CPU.
    """

    method: Literal["fork", "spawn"]
    gpus: list[int] | None


def place(
    device: torch.device, gpus: int, workers: int, threads: int | None, platform: str = sys.platform
) -> Placement:
    """Choose it; a pure function.

    A fork has the model and the data at once and imports nothing, but neither OpenMP's threads nor CUDA survive it.
    On GPUs the processes take turns from the leader's on, so that each has one of its own while there are enough.

    Args:
        device: of the model in this process, the leader.
        gpus: of this machine.
        workers: processes, this one included.
        threads: of each process.
        platform: as sys.platform.
    """
    if device.type == "cuda":
        if not gpus:
            raise ValueError(f"the model is on {device}, and this machine has no GPU; use --device cpu")
        first = device.index or 0
        return Placement("spawn", [(first + rank) % gpus for rank in range(workers)])
    return Placement("fork" if threads == 1 and platform == "linux" else "spawn", None)


def environment(placement: Placement, rank: int) -> dict[str, str]:
    """What a process is started with: it sees its own GPU alone, as cuda:0.

    Args:
        placement: of all processes.
        rank: of this one.
    """
    if placement.gpus is None:
        return {}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpu = placement.gpus[rank]
    return {"CUDA_VISIBLE_DEVICES": visible[gpu] if gpu < len(visible) else str(gpu), "LOCAL_RANK": "0"}

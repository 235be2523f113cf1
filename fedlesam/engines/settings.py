"""How a federation is computed, and what it does about clients that fail."""

import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from fedlesam.core.checks import check_params, param
from fedlesam.core.choices import RANGES, Engine, OnError, Precision, StoreKind
from fedlesam.engines.placement import place
from fedlesam.engines.store import Store
from fedlesam.engines.watch import LOST_AFTER, check_lost_after


@dataclass(frozen=True)
class Execution:
    """How rounds are computed. Nothing here changes the results, but for the number of threads and the precision.

    Args:
        workers: processes that train the active clients side by side. End them with `Federation.close()`, or use the
            federation in a `with` block.
        threads: CPU threads of each worker. None is PyTorch's own choice, and 1 with several workers.
        engine: "plain" trains one client after the other; "stacked" trains the clients of a small model as one
            batched computation, with the same results to rounding, on one worker.
        stack_runs: rows of a stack that clients of several federations can share, always as many; it makes the engine
            "stacked". None stacks the clients of this federation alone.
        precision: of forward and backward passes: "tf32" for products on a GPU, "bf16" for autocast, "bf16-pure" for
            weights, activations and gradients in bfloat16. The weights that are moved, sent and summed are not rounded.
        compile: put the model through `torch.compile`.
        cuda_graphs: on a GPU, record local steps once and replay them, where model and rules allow it; the plain
            engine, not compiled.
        device: where to train, such as "cuda"; None is where the model is.
        store: with several workers clients' memories lie in `folder`, where all workers see them ("shared"), or stay
            with the worker that trained the client ("pinned").
        memory: bytes of clients' memory kept in RAM; the rest goes to `folder`. None keeps all of it.
        folder: for clients' memory beyond `memory`; None makes a temporary one where it is needed.
        lost_after: seconds of silence after which another process counts as lost; 0 waits for ever.
    """

    workers: int = param(1, **RANGES["workers"])
    threads: int | None = param(None, **RANGES["threads"])
    engine: Engine = "plain"
    stack_runs: int | None = param(None, **RANGES["stack_runs"])
    precision: Precision = "fp32"
    compile: bool = False
    cuda_graphs: bool = True
    device: str | None = None
    store: StoreKind = "shared"
    memory: int | None = param(None, **RANGES["memory"])
    folder: Path | None = None
    lost_after: float = LOST_AFTER

    def __post_init__(self) -> None:
        check_params(self)
        check_lost_after("Execution", self.lost_after)

    def check_fork(self, device: torch.device) -> None:
        """A ValueError for what does not survive the fork of this process into workers.

        Args:
            device: of the model.
        """
        threads = 1 if self.threads is None else self.threads
        if self.compile and self.workers > 1 and place(device, 1, self.workers, threads).method == "fork":
            raise ValueError(
                "compile does not work with several workers of one thread on the CPU: they are forks of this process, "
                "which PyTorch's compiler does not survive; use one worker, two threads each, or torchrun"
            )

    def make_store(self, owner: object, workers: int, *, empty: bool) -> Store:
        """The store for the clients' memories in one process.

        Args:
            owner: of the store; a temporary folder is deleted with it.
            workers: all processes that train; they share the budget of memory.
            empty: whether a folder that holds files is refused.
        """
        folder, memory = self.folder, self.memory
        if workers > 1 and memory is not None:
            memory //= workers
        if workers > 1 and self.store != "pinned":
            memory = 0
        if memory is not None and folder is None:
            folder = Path(tempfile.mkdtemp(prefix="fedlesam-memory-"))
            weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
        if folder is not None and empty and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder}: holds the memory of another run; choose another folder or empty it")
        return Store(folder, memory)


@dataclass(frozen=True)
class FailurePolicy:
    """What happens when a client fails: it raises, its numbers are not finite, or its update is too large.

    Args:
        on_error: "drop" leaves the client out of the round: it keeps its memory, and the record and a logged warning
            say why. "stop" raises the error, and nothing has changed.
        dropout: the probability that an active client never answers.
        max_update_norm: an update with a larger norm is a failure. None accepts any.
    """

    on_error: OnError = "drop"
    dropout: float = param(0.0, **RANGES["dropout"])
    max_update_norm: float | None = param(None, above=0)

    def __post_init__(self) -> None:
        check_params(self)

    @property
    def drops(self) -> bool:
        """Whether clients that fail are dropped from the round."""
        return self.on_error == "drop"


def find_device(device: str) -> torch.device:
    """`cuda` is the GPU of this process's local rank; a device that is not there is refused.

    Args:
        device: auto, cpu, cuda or cuda:i.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        meant = "; did you mean cuda?" if device.lower().startswith("gpu") else ""
        raise ValueError(f"device {device!r}: expected auto, cpu, cuda or cuda:i{meant}") from error
    if chosen.type not in ("cpu", "cuda"):
        why = ""
        if chosen.type == "mps":
            why = "; mps has no float64, in which means over clients and norms are computed: use cpu"
        raise ValueError(f"device {device!r}: expected auto, cpu, cuda or cuda:i{why}")
    if chosen.type == "cuda":
        gpus, rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
        index = rank % max(1, gpus) if chosen.index is None else chosen.index  # more ranks than GPUs share them
        if index >= gpus:
            raise ValueError(f"device {device!r}: {_seen(gpus)}, or use cpu")
        return torch.device("cuda", index)
    return chosen


def _seen(gpus: int) -> str:
    """Why a GPU is not there, and what to do about it."""
    if gpus:
        return f"PyTorch sees {gpus} GPU{'s' if gpus > 1 else ''}: use a number below {gpus}"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch sees no GPU (torch {torch.__version__} is built without CUDA): install a build with it"
    return "PyTorch sees no GPU (no driver, no device, or CUDA_VISIBLE_DEVICES hides it): see nvidia-smi"

"""Settings of a process while it computes: threads, random number generators, malloc."""

import contextlib
import ctypes
import functools
import gc
import os
import platform
from collections.abc import Iterator

import torch

from fedlesam.core import seeds
from fedlesam.core.choices import Precision

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
LARGE = 128 << 20
"""Bytes; a larger block is still returned to the system when it is freed. Vectors of ResNet-18 are smaller."""
NEVER = (1 << 31) - 1
_chosen: set[int] = set()
"""Numbers of threads that were set: the first time MKL's own choice of threads ends with it."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""PyTorch's: whether tensors of 2 MB and more are in transparent huge pages, where Linux has them."""


@contextlib.contextmanager
def compute_context(threads: int | None, device: torch.device, precision: Precision = "fp32") -> Iterator[None]:
    """Compute inside the block; afterwards the caller's threads, generators and precision of products are as before.

    Args:
        threads: to compute with; None leaves the process's own number.
        device: whose random number generator is restored, beside the CPU's.
        precision: "tf32" multiplies in TensorFloat-32 on GPUs that have it; any other leaves the process's own choice.
    """
    keep_freed_memory()
    products = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    before = torch.get_num_threads()
    other = threads is not None and threads != before
    if threads is not None and (other or not _chosen):
        torch.set_num_threads(threads)
        _chosen.add(threads)
    try:
        with seeds.preserve_rng(device):
            yield
    finally:
        if torch.get_float32_matmul_precision() != products:
            torch.set_float32_matmul_precision(products)
        if other:
            torch.set_num_threads(before)


class _SettledObjects:
    """Inside the block what is there already is left out of garbage collection: all of PyTorch takes a twentieth of
    the time. Blocks may be nested. An inner one looks only at what has come since, and leaves that out, too.
    """

    def __init__(self) -> None:
        self.depth, self.freezes = 0, False

    def __enter__(self) -> None:
        if not self.depth:
            self.freezes = gc.isenabled() and not gc.get_freeze_count()
        try:
            if self.freezes:
                gc.collect()  # of the runs before
                gc.freeze()
        except BaseException:  # Ctrl-C comes out of a collection
            self._leave()
            raise
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._leave()

    def _leave(self) -> None:
        if self.freezes and not self.depth:
            gc.unfreeze()


settled_objects = _SettledObjects()


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step; memory returned to the system is faulted in and zeroed again.

    That costs a tenth to a fifth of a step (docs/benchmarks.md). In exchange a process keeps its peak memory until it
    ends. Nothing is changed if the user has set malloc's thresholds, or without glibc.

    Larger blocks are asked for in huge pages, which are faulted in five times as fast; PyTorch looks at this setting
    when it makes its first large tensor.
    """
    os.environ.setdefault(HUGE_PAGES, "1")
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if platform.libc_ver()[0] == "glibc" and not chosen:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)


def return_freed_memory() -> None:
    """Have glibc return what is free now, such as the copies from which a model was made: vectors do not fit there."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def own_device(kind: str) -> torch.device:
    """The device of a kind in a process that was started for it: it sees one GPU.

    Args:
        kind: cpu or cuda.
    """
    return torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)

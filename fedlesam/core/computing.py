"""A process while it computes for a run: its threads, its random numbers, its memory."""

import contextlib
import ctypes
import functools
import os
import platform
from collections.abc import Iterator

import torch

from fedlesam.core import seeds

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
LARGE = 128 << 20
"""Bytes; a larger block still goes back to the system when it is freed. Vectors of ResNet-18 are smaller."""
NEVER = (1 << 31) - 1


@contextlib.contextmanager
def compute_context(threads: int | None, device: torch.device) -> Iterator[None]:
    """So many threads (None: the process's own); afterwards the caller's threads and random numbers are as before."""
    keep_freed_memory()
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with seeds.preserve_rng(device):
            yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one: given back, its pages are faulted in and zeroed every time.

    That is a tenth to a fifth of a step (docs/benchmarks.md). What a process takes at its peak stays its own until it
    ends. Who has set malloc's thresholds is left alone; where there is no glibc nothing is done.
    """
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if platform.libc_ver()[0] == "glibc" and not chosen:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)

"""A process while it computes: what it leaves as it was, and the memory it keeps."""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedlesam.core.computing import compute_context, settled_objects

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

ROUNDS = """
import resource, torch, fedlesam as fl
from fedlesam.models.catalogue import make_model
model = make_model("lenet", (3, 32, 32), 10, 0)
data = [(torch.zeros(200, 3, 32, 32), torch.zeros(200, dtype=torch.long))]
local = fl.LocalTraining(epochs=1, batch_size=50)
fed = fl.Federation(model, data, "fedavg", local, execution=fl.Execution(threads=1))
fed.round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fed.round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_callers_threads_and_random_numbers_are_left_alone() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.raises(KeyError), compute_context(threads + 1, torch.device("cpu")):
        assert torch.get_num_threads() == threads + 1
        torch.rand(1)
        raise KeyError
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_no_threads_of_its_own_leaves_those_of_the_process() -> None:
    before = torch.get_num_threads()
    with compute_context(None, torch.device("cpu")):
        torch.set_num_threads(before + 1)
    try:
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_the_precision_of_products_is_restored_whatever_changed_it() -> None:
    before = torch.get_float32_matmul_precision()
    with compute_context(1, torch.device("cpu")):
        first, second = (compute_context(1, torch.device("cpu"), "tf32") for _ in range(2))
        for context in (first, second):
            context.__enter__()
        for context in (first, second):  # not the last one first: runs in lockstep
            context.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == before


def page_faults(**environment: str) -> int:
    """Of the second of two rounds, in a process of its own; pages of the usual size."""
    command = [sys.executable, "-c", ROUNDS]
    environment |= {"THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_step_reuses_the_memory_of_the_step_before() -> None:
    """Four steps need some 50 MB each: 10,000 pages and more when they are faulted in every time."""
    chosen_by_the_user = page_faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert chosen_by_the_user > 5_000
    assert page_faults() < chosen_by_the_user / 5


LARGE = """
import sys, resource, torch
from fedlesam.core.computing import keep_freed_memory
keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(50_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not HUGE.exists() or "[madvise]" not in HUGE.read_text(), reason="huge pages are not a program's choice here"
)
def test_large_vectors_are_in_huge_pages() -> None:
    """200 MB are 48,829 pages of 4 kB; what the user has chosen stays."""
    command = [sys.executable, "-c", LARGE]
    free = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    faults = [
        int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
        for env in (free, free | {"THP_MEM_ALLOC_ENABLE": "0"})
    ]
    assert faults[0] < 30_000 < faults[1]


def test_a_collection_that_is_interrupted_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is often heard in a collection, which may be the longest of what Python does alone."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    gc.unfreeze()
    try:
        with monkeypatch.context() as during:
            during.setattr(gc, "collect", interrupted)
            with pytest.raises(KeyboardInterrupt):
                settled_objects.__enter__()
        assert (settled_objects.depth, gc.get_freeze_count()) == (0, 0)
        with settled_objects:
            with settled_objects:
                assert gc.get_freeze_count() > 0
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as it is in all tests

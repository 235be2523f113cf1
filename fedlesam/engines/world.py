"""Processes that work on one run together, and the messages between them.

Everything goes over torch.distributed: byte messages over gloo, sums of vectors over gloo or, on GPUs, nccl. A message
is a safetensors file in memory, so nothing is unpickled.
"""

import contextlib
import ctypes
import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fedlesam.core.messages import unshare
from fedlesam.engines.meeting import WorkerLost as WorkerLost
from fedlesam.engines.meeting import agree, open_store
from fedlesam.engines.signals import STOPS
from fedlesam.engines.watch import LOST_AFTER, Watch, cut, sockets, watch_children

FOREVER = datetime.timedelta(days=365)
"""A slow worker is left alone; one that dies closes its connections and is noticed at once. For the rest: watch.py."""

KEPT = "everything up to the last round is kept, start the run again"

EXIT_CODE = 4
"""The command line's for a lost worker."""

GRACE = 30.0
"""Seconds in which a process that is told of a loss must see to its end; then it just ends."""


class World:
    """This process's place among `size` processes; rank 0 leads."""

    def __init__(self, rank: int, size: int, meeting: Path | None = None) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting
        self.open = True
        self.children: list[Any] = []
        self.lost, self.why = threading.Event(), ""
        self.watch: Watch | None = None
        self.connections: set[int] = set()
        self._noticed = threading.Event()

    def check(self) -> None:
        """Raise if a process of the run is gone."""
        if self.lost.is_set():
            raise self._loss()

    def set_lost_after(self, seconds: float) -> None:
        """The leader says how long a process on another host may be silent; 0 is for ever."""
        if self.watch is not None and self.rank == 0:
            self.watch.say({"after": seconds})

    def lose(self, why: str) -> None:
        """From a thread: a process is lost, and the main thread must hear of it, whatever it waits for."""
        if self.lost.is_set() or not self.open:
            return
        self.why = why
        self.lost.set()
        cut(self.connections)
        if self.watch is not None and not self._noticed.wait(GRACE):
            print(f"error: {why}; everything up to the last checkpoint is kept, start the run again", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_CODE)

    def _loss(self) -> WorkerLost:
        self._noticed.set()
        if self.watch is not None:
            self.watch.say({"heard": True})
        return WorkerLost(f"{self.why}; {KEPT}")

    def broadcast(
        self, about: Any = None, tensors: Mapping[str, Tensor] | None = None
    ) -> tuple[Any, dict[str, Tensor]]:
        """Rank 0 says something, the others hear it."""
        content = _pack(about, tensors or {}) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([content.numel()])
        with self._talking():
            dist.broadcast(size, src=0)
            if self.rank != 0:
                content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, src=0)
        return (about, dict(tensors or {})) if self.rank == 0 else _unpack(content)

    def gather(self, about: Any, tensors: Mapping[str, Tensor] | None = None) -> list[tuple[Any, dict[str, Tensor]]]:
        """Everyone says something, rank 0 hears it in the order of the ranks; the others hear nothing."""
        content = _pack(about, tensors or {})
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._talking():
            dist.all_gather(sizes, torch.tensor([content.numel()]))
            largest = max(int(size) for size in sizes)
            padded = torch.zeros(largest, dtype=torch.uint8)
            padded[: content.numel()] = content
            into = [torch.empty(largest, dtype=torch.uint8) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(padded, into, dst=0)
        return [_unpack(part[: int(size)]) for part, size in zip(into or [], sizes, strict=False)]

    def add_up(self, total: Tensor) -> None:
        """The sum over all ranks, at rank 0, in place."""
        with self._talking():
            dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)

    @contextlib.contextmanager
    def _talking(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            if self.lost.wait(1 if self.watch is not None else 0):
                raise self._loss() from error
            raise WorkerLost(f"a process of this run is gone; {KEPT} ({str(error).splitlines()[0]})") from error

    def close(self, kill: bool = False) -> None:
        """End the workers this process started; `kill` ends them in the middle of whatever they do."""
        if not self.open:
            return  # the process group of now may be another world's
        self.open, self.connections = False, set()
        if self.watch is not None:
            self.watch.close()
        children, self.children = self.children, []
        for child in children:
            if not kill:
                child.join(timeout=5)
            if child.is_alive():
                child.kill()
            child.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.meeting is not None:
            shutil.rmtree(self.meeting, ignore_errors=True)


def from_environment() -> World | None:
    """The world torchrun or Slurm made, if this process was started in one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank, size)
    if not dist.is_initialized():
        store = open_store(size)
        name, hosts = agree(store, rank, size)
        store = PrefixStore(name, store)
        world.watch = Watch(rank, hosts, store, world.lose) if size > 1 else None
        world.connections = _join(store=store, rank=rank, world_size=size)
    return world


def start_local(
    workers: int, threads: int | None, serve: Callable[[World], None], lost_after: float = LOST_AFTER
) -> World:
    """Rank 0 in this process and `workers` - 1 more beside it, which `serve` until told to stop.

    One that is stopped by a signal for `lost_after` seconds is lost.

    They are forked, so they have the model and the data at once and need no import. That is safe only if they compute
    on one thread: OpenMP's threads do not survive a fork. With more threads they are started afresh, and what they are
    given must then be picklable.
    """
    import torch.multiprocessing as multiprocessing

    if dist.is_initialized():
        raise ValueError("torch.distributed is already in use in this process: start the run with torchrun instead")
    folder = Path(tempfile.mkdtemp(prefix="fedlesam-"))
    meeting = str(folder / "meeting")
    method = "fork" if threads == 1 and sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(method)
    world = World(0, workers, folder)
    try:
        signs = []
        for rank in range(1, workers):
            sign, tell = context.Pipe(duplex=False)
            arguments = (rank, workers, meeting, os.getpid(), threads, serve, tell)
            child = context.Process(target=_worker, args=arguments, daemon=True)
            child.start()
            tell.close()
            world.children.append(child)
            signs.append(sign)
        for sign in signs:
            _await(sign)
        watching = (list(world.children), lost_after, world.lose)
        threading.Thread(target=watch_children, args=watching, daemon=True).start()
        _meet(0, workers, meeting)
    except BaseException:
        world.close(kill=True)
        raise
    return world


def _await(sign: Any) -> None:
    """A worker's sign of life; meeting it comes after, since that would wait for a dead one without end."""
    try:
        with sign:
            sign.recv_bytes()
    except EOFError:
        raise WorkerLost("a worker process died while it started; its own message is above") from None


def _worker(
    rank: int, size: int, meeting: str, parent: int, threads: int | None, serve: Callable[[World], None], tell: Any
) -> None:
    signal.set_wakeup_fd(-1)  # its parent listens to that
    for signum in STOPS:  # a signal to the whole group is the leader's to answer; this process goes with it
        signal.signal(signum, signal.SIG_IGN)
    _die_with_parent(parent)
    torch.set_num_threads(threads or 1)
    with tell:
        tell.send_bytes(b"here")
    try:
        _meet(rank, size, meeting)
        serve(World(rank, size))
    except WorkerLost:
        os._exit(1)
    os._exit(0)


def _meet(rank: int, size: int, meeting: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join(init_method=f"file://{meeting}", rank=rank, world_size=size)


def _join(**place: Any) -> set[int]:
    """The connections that were made."""
    before = sockets()
    hook = sys.excepthook
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=FOREVER, **place)
    sys.excepthook = hook  # torch's would put [rank0] before every line of every traceback
    return sockets() - before


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process with its parent; elsewhere the closed connection ends it at its next message."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _pack(about: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    content = unshare({name: tensor.cpu() for name, tensor in tensors.items()}) or {"": torch.empty(0)}
    return torch.frombuffer(bytearray(save(content, metadata={"about": json.dumps(about)})), dtype=torch.uint8)


def _unpack(content: Tensor) -> tuple[Any, dict[str, Tensor]]:
    data = content.numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
    return about, {name: tensor for name, tensor in load(data).items() if name}

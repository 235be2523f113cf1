"""The processes of one run, and the messages between them.

All communication uses torch.distributed over gloo, on GPUs too: a round has one broadcast and one sum of vectors, and
nccl would refuse processes that share a GPU. A message is JSON and tensors in the codec of core/state.py, so nothing is
unpickled.
"""

import contextlib
import ctypes
import datetime
import os
import pickle
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
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fedlesam.core.slots import State
from fedlesam.core.state import from_bytes, to_bytes
from fedlesam.engines.meeting import WorkerLost as WorkerLost
from fedlesam.engines.meeting import agree, open_store
from fedlesam.engines.placement import environment, place
from fedlesam.engines.signals import STOPS
from fedlesam.engines.watch import LOST_AFTER, Watch, cut, sockets, watch_children

FOREVER = datetime.timedelta(days=365)
"""torch.distributed must not time out a slow worker; watch.py finds those that are dead or stopped."""

KEPT = "everything up to the last round is kept, start the run again"

EXIT_CODE = 4
"""Of the command line, for a lost worker."""

GRACE = 30.0
"""Seconds that a process has to end by itself after another one is lost; then it exits at once."""


class World:
    """This process's place among the processes of a run; rank 0 is the leader.

    Args:
        rank: of this process.
        size: the number of processes.
        meeting: a temporary folder, deleted by `close`.
    """

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
        """Set how long a process on another host may be silent; the leader's setting is everyone's.

        Args:
            seconds: until a silent process counts as lost; 0 means never.
        """
        if self.watch is not None and self.rank == 0:
            self.watch.send({"after": seconds})

    def lose(self, why: str) -> None:
        """Called by a thread that watches: interrupt the main thread, whatever it waits for.

        Args:
            why: a sentence about the process that is lost.
        """
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
            self.watch.send({"heard": True})
        return WorkerLost(f"{self.why}; {KEPT}")

    def broadcast(self, message: Any = None, tensors: Mapping[str, Tensor] | None = None) -> tuple[Any, State]:
        """Send a message from rank 0 to all; every process returns it.

        Args:
            message: anything that JSON holds; given at rank 0 only.
            tensors: sent with it.
        """
        content = _pack(message, tensors or {}) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([content.numel()])
        with self._communicating():
            dist.broadcast(size, src=0)
            if self.rank != 0:
                content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, src=0)
        return (message, dict(tensors or {})) if self.rank == 0 else _unpack(content)

    def gather(self, message: Any, tensors: Mapping[str, Tensor] | None = None) -> list[tuple[Any, State]]:
        """Send a message from every process to rank 0, which returns them in the order of the ranks; others return [].

        Args:
            message: anything that JSON holds.
            tensors: sent with it.
        """
        content = _pack(message, tensors or {})
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._communicating():
            dist.all_gather(sizes, torch.tensor([content.numel()]))
            largest = max(int(size) for size in sizes)
            padded = torch.zeros(largest, dtype=torch.uint8)
            padded[: content.numel()] = content
            into = [torch.empty(largest, dtype=torch.uint8) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(padded, into, dst=0)
        return [_unpack(part[: int(size)]) for part, size in zip(into or [], sizes, strict=False)]

    def add_up(self, total: Tensor) -> None:
        """Replace a vector at rank 0 by the sum over all ranks.

        Args:
            total: the vector of this process.
        """
        host = total.cpu()
        with self._communicating():
            dist.reduce(host, dst=0, op=dist.ReduceOp.SUM)
        if host is not total and self.rank == 0:
            total.copy_(host)

    @contextlib.contextmanager
    def _communicating(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            if self.lost.wait(1 if self.watch is not None else 0):
                raise self._loss() from error
            raise WorkerLost(f"a process of this run is gone; {KEPT} ({str(error).splitlines()[0]})") from error

    def close(self, kill: bool = False) -> None:
        """Leave the process group, and end the workers that this process started.

        Args:
            kill: do not wait until they end by themselves.
        """
        if not self.open:
            return  # the present process group may belong to another world
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
    """The world that torchrun or Slurm started this process in; None without one."""
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
    workers: int,
    threads: int | None,
    serve: Callable[[World], None],
    lost_after: float = LOST_AFTER,
    device: torch.device | None = None,
) -> World:
    """Start worker processes on this machine, forked or spawned (placement.py); this process is rank 0.

    Args:
        workers: the number of processes, this one included.
        threads: of each process.
        serve: what a worker does until the leader stops it.
        lost_after: seconds after which a worker that a signal has stopped counts as lost; 0 means never.
        device: of the model in this process; None is the CPU.
    """
    import torch.multiprocessing as multiprocessing

    if dist.is_initialized():
        raise ValueError("torch.distributed is already in use in this process: start the run with torchrun instead")
    folder = Path(tempfile.mkdtemp(prefix="fedlesam-"))
    meeting = str(folder / "meeting")
    placement = place(device or torch.device("cpu"), torch.cuda.device_count(), workers, threads)
    context: Any = multiprocessing.get_context(placement.method)
    world = World(0, workers, folder)
    try:
        started = []
        for rank in range(1, workers):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, workers, meeting, os.getpid(), threads, serve, sender)
            child = context.Process(target=_worker, args=arguments, daemon=True)
            _start(child, environment(placement, rank))
            sender.close()
            world.children.append(child)
            started.append(receiver)
        for receiver in started:
            _await(receiver)
        watching = (list(world.children), lost_after, world.lose)
        threading.Thread(target=watch_children, args=watching, daemon=True).start()
        _meet(0, workers, meeting)
    except BaseException:
        world.close(kill=True)
        raise
    return world


def _start(child: Any, variables: dict[str, str]) -> None:
    """Start a process with variables of its own; a new one is sent what it needs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        child.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"workers with several threads or on GPUs are new processes, and what they need cannot be sent: {error}; "
            "define the model, the loss and the data at the top level of a module, or start the run with torchrun"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _await(receiver: Any) -> None:
    """Wait until a worker has started. The rendezvous comes later: it would wait for a dead worker without end."""
    try:
        with receiver:
            receiver.recv_bytes()
    except EOFError:
        raise WorkerLost("a worker process died while it started; its own message is above") from None


def _worker(
    rank: int, size: int, meeting: str, parent: int, threads: int | None, serve: Callable[[World], None], sender: Any
) -> None:
    signal.set_wakeup_fd(-1)  # inherited; the parent reads it
    for signum in STOPS:  # the leader handles a signal to the whole group, and ends this process
        signal.signal(signum, signal.SIG_IGN)
    _die_with_parent(parent)
    torch.set_num_threads(threads or 1)
    with sender:
        sender.send_bytes(b"started")
    try:
        _meet(rank, size, meeting)
        serve(World(rank, size))
    except WorkerLost:
        os._exit(1)
    os._exit(0)


def _meet(rank: int, size: int, meeting: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join(init_method=f"file://{meeting}", rank=rank, world_size=size)


def _join(**where: Any) -> set[int]:
    """Join the process group; the file numbers of the connections that it opened."""
    before = sockets()
    hook = sys.excepthook
    dist.init_process_group("gloo", timeout=FOREVER, **where)
    sys.excepthook = hook  # torch's would print [rank0] before every line of a traceback
    return sockets() - before


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process with its parent; elsewhere the closed connection ends it at its next message."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _pack(message: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.frombuffer(bytearray(to_bytes(tensors, message=message)), dtype=torch.uint8)


def _unpack(content: Tensor) -> tuple[Any, State]:
    tensors, metadata = from_bytes(content.numpy().tobytes())
    return metadata["message"], tensors

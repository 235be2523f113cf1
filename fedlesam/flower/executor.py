"""Runs the messages of SuperNodes without importing PyTorch for each of them.

Flower starts a new process for every message, which imports Flower, PyTorch and this package. Here that process is
forked from one that has imported them and has computed nothing. It is as short-lived as Flower's own: a message leaves
nothing behind.
"""

import importlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

PRELOADED = (
    "flwr.supernode.runtime.run_clientapp",
    "torch",
    "fedlesam.flower.client",
    "fedlesam.data.catalogue",
    "fedlesam.data.splits",
    "fedlesam.models.catalogue",
)
POLL = 0.25
"""Seconds between two questions for a message; Flower's own executor asks once a second."""
PATIENCE = 60.0
"""Seconds without an answer after which a SuperNode counts as gone."""


def run_executor(ports: Sequence[int], preload: Sequence[str] = (), poll: float = POLL) -> None:
    """Run the messages of SuperNodes of this machine until one of them is gone.

    Args:
        ports: of the SuperNodes, which were started with `--isolation process`.
        preload: more modules to import once.
        poll: seconds between two questions for a message.
    """
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    for module in (*PRELOADED, *preload):
        importlib.import_module(module)
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    wanted = AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})
    with ExitStack() as stack:
        clients = {
            port: stack.enter_context(RuntimeHttpClient.from_server_address(_address(port), True, None, [version]))
            for port in ports
        }
        heard = dict.fromkeys(ports, time.monotonic())
        while True:
            for port, node in clients.items():
                try:
                    found = node.AcquireTask(wanted)
                    heard[port] = time.monotonic()
                except httpx.TransportError as error:
                    if time.monotonic() - heard[port] > PATIENCE:
                        raise ValueError(
                            f"{_address(port)}: no SuperNode answered for {PATIENCE:.0f} s ({error}); start it with "
                            f"flower-supernode --isolation process --port {port}"
                        ) from error
                    continue
                if found.HasField("task") and found.token:
                    _fork(port, found.token, own_home=len(ports) > 1)
            multiprocessing.active_children()  # forgets those that have ended
            time.sleep(poll)


def _address(port: int) -> str:
    return f"127.0.0.1:{port}"


def _fork(port: int, token: str, own_home: bool) -> None:
    arguments = (port, token, os.getpid(), own_home)
    multiprocessing.get_context("fork").Process(target=_run_message, args=arguments).start()


def _run_message(port: int, token: str, executor: int, own_home: bool) -> None:
    from flwr.supercore.utils import get_flwr_home
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    if own_home:  # or two processes would install the app into one folder at the same time
        os.environ["FLWR_HOME"] = str(get_flwr_home() / f"node-{port}")
    run_clientapp(_address(port), token, insecure=True, parent_pid=executor, runtime_dependency_install=False)

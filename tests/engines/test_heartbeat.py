"""The process that beats for another: whom it hears, whom it misses, whom it does not believe."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.engines import heartbeat, watch
from fedlesam.engines.heartbeat import LINE, sign, verify

SECRET = "of this run"
HOSTS = ["alpha", "beta", "gamma"]
COMMAND = [sys.executable, "-I", "-S", heartbeat.__file__]
AFTER = 2.0


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3))
def test_a_signed_message_is_what_was_said(said: dict[str, Any]) -> None:
    line = sign(b"secret", said)
    assert line.count(b"\n") == 1
    assert verify(b"secret", line) == said
    with pytest.raises(ValueError, match="not signed"):
        verify(b"another", line)


@given(st.binary(max_size=200))
def test_garbage_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not signed"):
        verify(b"secret", content)


class Beside:
    """A heart of this process."""

    def __init__(
        self, rank: int, port: int = 0, after: float = AFTER, secret: str = SECRET, there: bool = True
    ) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, text=True)
        about = {"rank": rank, "hosts": HOSTS, "secret": secret, "after": after, "parent": os.getpid()}
        self.say({**about, "bind": "127.0.0.1", "addresses": [["127.0.0.1", port]]})
        self.port: int = self.hear()["port"] if rank == 0 else port
        if rank and there:
            assert self.hear() == {"there": True}

    def say(self, said: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(said), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def three() -> Iterator[list[Beside]]:
    hearts = [Beside(0)]
    try:
        hearts += [Beside(rank, hearts[0].port) for rank in (1, 2)]
        yield hearts
    finally:
        for heart in hearts:
            heart.end()


def all_is_well(hearts: list[Beside]) -> None:
    """Nobody has said anything, and all go when they are told."""
    for heart in reversed(hearts):
        heart.say({"bye": True})
        assert heart.hear() is None
        assert heart.process.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_who_is_silent_is_missed_by_all(signum: int, three: list[Beside]) -> None:
    three[2].process.send_signal(signum)
    sentence = "process 2 on host gamma (127.0.0.1) has not been heard for 2 s: dead, stopped, or cut off"
    heard = three[0].hear()["lost"]
    assert heard.startswith(sentence)
    assert three[1].hear()["lost"] == heard, "in the same words"
    for heart in three[:2]:
        heart.say({"heard": True})
        assert heart.process.wait() == 0


def test_everyone_misses_the_leader(three: list[Beside]) -> None:
    three[0].process.send_signal(signal.SIGSTOP)
    for heart in three[1:]:
        assert "process 0 on host alpha (127.0.0.1) has not been heard for 2 s" in heart.hear()["lost"]
    three[0].process.send_signal(signal.SIGCONT)
    assert "process 0" in three[0].hear()["lost"], "who comes too late hears that it is too late"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_short_silence_is_forgiven(rank: int, three: list[Beside]) -> None:
    three[rank].process.send_signal(signal.SIGSTOP)
    time.sleep(AFTER / 2)
    three[rank].process.send_signal(signal.SIGCONT)
    time.sleep(AFTER)
    all_is_well(three)


def test_all_stopped_at_once_blame_nobody(three: list[Beside]) -> None:
    """As a queue does that suspends a job, on all its hosts."""
    for signum, pause in ((signal.SIGSTOP, AFTER + 1), (signal.SIGCONT, AFTER)):
        for heart in three:
            heart.process.send_signal(signum)
        time.sleep(pause)
    all_is_well(three)


def test_who_says_goodbye_is_not_missed(three: list[Beside]) -> None:
    three[1].say({"bye": True})
    time.sleep(AFTER + 1)
    all_is_well([three[0], three[2]])


def test_who_never_comes_is_missed() -> None:
    heart = Beside(0, after=1.0)
    try:
        heard = heart.hear()["lost"]
        assert heard.startswith("process 1 on host beta and process 2 on host gamma have not been heard for 1 s")
    finally:
        heart.end()


def test_the_leader_sets_the_time(three: list[Beside]) -> None:
    three[0].say({"after": 0})
    time.sleep(AFTER / 2)
    three[1].process.send_signal(signal.SIGSTOP)
    time.sleep(AFTER + 1)
    three[1].process.send_signal(signal.SIGCONT)
    three[0].say({"after": 1.5})
    time.sleep(0.5)
    three[0].process.kill()
    assert "not been heard for 1.5 s" in three[2].hear()["lost"]


def test_strangers_are_cut_off(three: list[Beside]) -> None:
    others_goodbye = sign(b"another run", {"rank": 1, "bye": True}) + sign(b"another run", {"bye": True})
    wrong = [sign(SECRET.encode(), {"rank": rank}) for rank in (0, 3, -1, "1", None, 1.0, [], True)]
    lines = [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 99 + b"\n", b"x" * 3 * LINE, others_goodbye, *wrong[:-1]]
    for line in lines:
        with socket.create_connection(("127.0.0.1", three[0].port), timeout=20) as stranger:
            stranger.sendall(line)
            try:
                assert stranger.recv(100) == b"", line
            except ConnectionResetError:
                continue
    silent = [socket.create_connection(("127.0.0.1", three[0].port)) for _ in range(100)]
    time.sleep(AFTER + 1)
    for stranger in silent:
        stranger.close()
    all_is_well(three)


def test_a_stranger_as_leader_is_not_believed() -> None:
    leader = Beside(0, after=0, secret="of another run")
    other = Beside(1, leader.port, there=False)
    try:
        assert "process 0 on host alpha" in other.hear()["lost"]
    finally:
        leader.end()
        other.end()


def alive(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_it_does_not_outlive_its_process() -> None:
    """Not even where a child of that process keeps the pipe open."""
    about = {"rank": 0, "hosts": HOSTS, "secret": "", "after": 60, "bind": "127.0.0.1", "addresses": []}
    script = f"""
import json, os, subprocess
from subprocess import DEVNULL, PIPE
heart = subprocess.Popen({COMMAND!r}, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
heart.stdin.write(json.dumps({about!r} | dict(parent=os.getpid())).encode() + b"\\n")
heart.stdin.flush()
assert heart.stdout.readline()
keeper = subprocess.Popen(["sleep", "60"], stdout=DEVNULL, stderr=DEVNULL, pass_fds=[heart.stdin.fileno()])
print(heart.pid, keeper.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    heart, keeper = (int(word) for word in done.stdout.split())
    try:
        for _ in range(200):
            if not alive(heart):
                return
            time.sleep(0.1)
        raise AssertionError("it is still there")
    finally:
        os.kill(keeper, signal.SIGKILL)


def test_only_a_stopped_process_is_stopped() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert not heartbeat.stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        while not heartbeat.stopped(child.pid):
            time.sleep(0.01)
        child.send_signal(signal.SIGCONT)
        while heartbeat.stopped(child.pid):
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert not heartbeat.stopped(child.pid), "nor one that is gone"


@pytest.mark.parametrize(
    ("master", "hosts", "expected"),
    [
        ("127.0.0.1", ["a", "a"], (["127.0.0.1"], "127.0.0.1")),
        ("127.0.0.1", ["a", "b"], (["127.0.0.1", "a"], "0.0.0.0")),
    ],
)
def test_it_listens_where_the_others_can_call(
    master: str, hosts: list[str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert watch.own_address(hosts) == expected


@pytest.mark.parametrize("seconds", [-1, 0.5, float("nan"), float("inf"), "soon"])
def test_times_that_cannot_be_meant(seconds: Any) -> None:
    with pytest.raises(ValueError, match="lost_after must be"):
        watch.check_lost_after("run", seconds)

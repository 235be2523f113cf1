"""Messages out, replies in, until all are there or the time is over."""

import time
from collections.abc import Mapping

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

POLL = 0.5
"""Seconds between two looks for replies."""

LATE = "no answer in time"


def exchange(grid: Grid, messages: Mapping[int, Message], timeout: float) -> tuple[dict[int, Message], dict[int, str]]:
    """By client: its reply, or why there is none.

    Replies are pulled one by one. One that cannot be read then costs only itself: a pull of many would fail as a whole,
    after the SuperLink has marked all of them as delivered.
    """
    replies: dict[int, Message] = {}
    missing: dict[int, str] = {}
    pushed = list(grid.push_messages(list(messages.values()))) if messages else []
    waiting = {}
    for client, identity in zip(messages, pushed, strict=True) if len(pushed) == len(messages) else ():
        if identity:
            waiting[client] = identity
    missing.update({client: "the message could not be sent" for client in messages if client not in waiting})
    deadline = time.monotonic() + timeout
    while waiting:
        for client, identity in list(waiting.items()):
            try:
                found = list(grid.pull_messages([identity]))
            except httpx.HTTPError:
                raise
            except Exception as error:
                missing[client] = f"the answer cannot be read: {error}"
                del waiting[client]
                continue
            if found:
                replies[client] = found[0]
                del waiting[client]
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            break
        time.sleep(min(POLL, left))
    return replies, missing | dict.fromkeys(waiting, LATE)

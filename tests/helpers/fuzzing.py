"""Damage to files, by number: the same kind and number do the same damage on every machine.

`make test` tries some thousands of cases, FEDLESAM_TORTURE=1 25 times as many (FEDLESAM_TORTURE=N: N times 25), and
FEDLESAM_CASE=N only case N.
"""

import contextlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FACTOR = 25 * int(os.environ.get("FEDLESAM_TORTURE") or 0) or 1
SHOWN = 10
"""Failures that are shown in full."""

Tree = dict[str, bytes | str]
"""What is under a folder: a file's content; `dir`, or a link's target."""

HUGE = (0, -1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**18, 10**30, 10**400, -(10**400))
HOSTILE: tuple[Any, ...] = (
    *HUGE, None, True, False, 0.5, 1e308, float("nan"), float("inf"), "", "x", "-1", "1e400", "../../outside.txt",
    "/etc/hostname", "\x00", "\ud800", "a\nb", "é" * 300, [], {}, [[]], {"": {}}, [1, 2], {"size": 1}, "NaN",
    "[/x] [red]",
)  # fmt: skip


def fuzz(kind: str, cases: int, attempt: Callable[[random.Random], str]) -> Counter[str]:
    """Count what `attempt` returns over the cases, and print it; every failure is named by its number."""
    alone = os.environ.get("FEDLESAM_CASE")
    numbers = [int(alone)] if alone else range(cases * FACTOR)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    first: BaseException | None = None
    began = time.perf_counter()
    for number in numbers:
        try:
            outcomes[attempt(random.Random(f"{kind} {number}"))] += 1
        except Exception as error:
            first = first or error
            failures.append(f"FEDLESAM_CASE={number}: {type(error).__name__}: {error}"[:600])
            print(f"\nfuzz {kind}: {failures[-1]}", flush=True)
    seconds = time.perf_counter() - began
    counts = ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()))
    print(f"\nfuzz {kind}: {len(numbers)} cases, {counts}, failures {len(failures)}, {seconds:.0f} s", flush=True)
    if first is not None:
        shown = "\n".join(failures[:SHOWN])
        raise AssertionError(f"{len(failures)} of {len(numbers)} cases of {kind!r} failed:\n{shown}") from first
    return outcomes


def one_line(error: BaseException) -> None:
    """A user gets one line that says something."""
    assert len(str(error).splitlines()) == 1, f"not one line: {error!r}"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is such a place: a case makes and deletes many files."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fedlesam-fuzz-", dir=where) as folder:
        yield Path(folder)


# bytes


def damage(draw: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A file's content, changed; now and then several times over."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = draw.choice(CHANGES)(draw, data)
    if others and draw.random() < 0.05:
        return draw.choice(others)
    return data


def _place(draw: random.Random, data: bytes) -> int:
    """Anywhere, but often near the ends, where headers are."""
    return draw.choice((draw.randrange(len(data) + 1), min(len(data), draw.randrange(64)), len(data)))


def _chunk(draw: random.Random, data: bytes) -> tuple[int, int]:
    start = _place(draw, data)
    return start, min(len(data), start + draw.choice((1, 2, 8, 64, 512, len(data))))


def _flip(draw: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    place = min(_place(draw, data), len(data) - 1)
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def _truncate(draw: random.Random, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _insert(draw: random.Random, data: bytes) -> bytes:
    place = _place(draw, data)
    return data[:place] + draw.randbytes(draw.choice((1, 1, 3, 40, 1000))) + data[place:]


def _remove(draw: random.Random, data: bytes) -> bytes:
    start, end = _chunk(draw, data)
    return data[:start] + data[end:]


def _zero(draw: random.Random, data: bytes) -> bytes:
    start, end = _chunk(draw, data)
    return data[:start] + bytes(end - start) + data[end:]


def _repeat(draw: random.Random, data: bytes) -> bytes:
    start, end = _chunk(draw, data)
    return data[:end] + data[start:end] * draw.choice((1, 1, 3)) + data[end:]


def _swap(draw: random.Random, data: bytes) -> bytes:
    a, b, c = sorted(_place(draw, data) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _random_block(draw: random.Random, data: bytes) -> bytes:
    start, end = _chunk(draw, data)
    return data[:start] + draw.randbytes(end - start) + data[end:]


def _large_header(draw: random.Random, data: bytes) -> bytes:
    """Lengths come first in many formats."""
    size = draw.choice((4, 8))
    value = draw.choice((0, 1, len(data), 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)) % 2 ** (8 * size)
    return value.to_bytes(size, draw.choice(("little", "big"))) + data[size:]  # type: ignore[arg-type]


def _huge_number(draw: random.Random, data: bytes) -> bytes:
    found = list(re.finditer(rb"\d+(\.\d+)?", data))
    if not found:
        return data + b"9" * 5000
    place = draw.choice(found)
    new = draw.choice(
        (b"-1", b"0", b"1e999", b"9" * 25, b"9" * 400, b"9" * 5000, b"0.5", b"NaN", b"nan", b"true", b'""')
    )
    return data[: place.start()] + new + data[place.end() :]


def _nest(draw: random.Random, data: bytes) -> bytes:
    place, depth = _place(draw, data), draw.choice((20, 3000, 200_000))
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[", b"")))
    return data[:place] + opening * depth + b"1" + closing * depth + data[place:]


def _not_utf8(draw: random.Random, data: bytes) -> bytes:
    place = _place(draw, data)
    return data[:place] + draw.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x00")) + data[place:]


def _line(draw: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if not lines:
        return b"\n"
    place = draw.randrange(len(lines))
    change = draw.randrange(4)
    if change == 0:
        del lines[place]
    elif change == 1:
        lines.insert(draw.randrange(len(lines) + 1), lines[place])
    elif change == 2:
        draw.shuffle(lines)
    else:
        lines[place] = draw.choice(
            (b"\n", b"null\n", b"5\n", b"[]\n", b'"x"\n', b"{}\n", b"[1]\n", b"x = 1\n", b"[x]\n")
        )
    return b"".join(lines)


def _nothing_left(draw: random.Random, data: bytes) -> bytes:
    return draw.choice((b"", b"\n", bytes(len(data)), draw.randbytes(50), b"{}", b"[]", b"null", b"7", b'"x"'))


CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _flip, _truncate, _truncate, _insert, _remove, _zero, _repeat, _swap, _random_block, _large_header,
    _huge_number, _nest, _not_utf8, _line, _nothing_left,
)  # fmt: skip


# JSON


def damage_json(draw: random.Random, value: Any) -> Any:
    """A JSON value with one of its parts replaced, deleted, added or renamed."""
    root = [json.loads(json.dumps(value))]
    holder, key = draw.choice(list(_parts(root)))
    change = draw.randrange(6)
    if change <= 2 or holder is root:
        holder[key] = draw.choice(HOSTILE)
        if draw.random() < 0.02:
            for _ in range(draw.choice((50, 400))):
                holder[key] = [holder[key]]
    elif change == 3:
        del holder[key]
    elif isinstance(holder, dict):
        new = draw.choice(["", "0", "-1", "x", "../x", "../../outside.txt", "9" * 30, "é", *holder])
        holder[new] = holder.pop(key) if change == 4 else draw.choice(HOSTILE)
    else:
        holder.insert(draw.randrange(len(holder) + 1), draw.choice([*HOSTILE, *holder]))
    return root[0] if root else None


def _parts(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(items):
        yield value, key
        if isinstance(part, dict | list):
            yield from _parts(part)


# folders


def read_tree(folder: Path) -> Tree:
    found: Tree = {}
    _read_into(found, str(folder), "")
    return found


def _read_into(found: Tree, folder: str, under: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = under + entry.name
            if entry.is_symlink():
                found[name] = f"-> {Path(entry.path).readlink()}"
            elif entry.is_dir():
                found[name] = "dir"
                _read_into(found, entry.path, f"{name}/")
            else:
                found[name] = _content(entry.path)


def _content(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(handle, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(handle)


def make_tree(folder: Path, wanted: Mapping[str, bytes | str]) -> None:
    """Bring a folder to what is wanted; files that are so already are not touched."""
    there = read_tree(folder)
    for name in sorted(there.keys() - {n for n in there if there[n] == wanted.get(n)}, reverse=True):
        _delete(folder / name)
    for name in sorted(wanted):
        content, path = wanted[name], folder / name
        if there.get(name) == content and (content != "dir" or path.is_dir()):
            continue
        if content == "dir":
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.symlink_to(content.removeprefix("-> "))
        else:
            path.write_bytes(content)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage_tree(draw: random.Random, tree: Tree, victims: Sequence[str]) -> Tree:
    """A folder in which some of the victims are damaged, lost, exchanged or something else than a file."""
    tree = dict(tree)
    files = [name for name in victims if isinstance(tree.get(name), bytes)]
    contents = [tree[name] for name in files]
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        name = draw.choice(files)
        change = draw.randrange(20)
        content = tree.get(name)
        if change <= 12 and isinstance(content, bytes):
            tree[name] = damage(draw, content, [c for c in contents if isinstance(c, bytes)])
        elif change == 13:
            tree.pop(name, None)
        elif change == 14:
            tree[name] = "dir"
            if draw.random() < 0.5:
                tree[f"{name}/x"] = b"x"
        elif change == 15:
            tree[name] = draw.choice(("-> nowhere", "-> .", f"-> {name.rpartition('/')[2]}"))
        elif change in (16, 17):
            other = draw.choice(files)
            tree[name], tree[other] = tree.get(other, b""), tree.get(name, b"")
        elif change == 18:
            tree[draw.choice(files)] = tree.get(name, b"")
        else:
            tree[f"{name}{draw.choice(('.part', '.bak', '~'))}"] = draw.randbytes(30)
    return {name: content for name, content in tree.items() if _has_folder(tree, name)}


def _has_folder(tree: Tree, name: str) -> bool:
    above, _, _ = name.rpartition("/")
    return not above or (tree.get(above) == "dir" and _has_folder(tree, above))

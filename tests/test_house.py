"""The house: imports go one way, and the core stays small enough to read in one sitting."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fedlesam"

ROOMS = [
    "core",
    "rules",
    "algorithms",
    "models",
    "data",
    "engines",
    "federation",
    "probes",
    "runs",
    "report",
    "flower",
    "cli",
    "__main__",
    "__init__",
]
"""From the ground up: a room may import from rooms above it in this list, never from below."""

DOOR = ("federation", "runs.fit")
"""`Federation.fit` hands itself to the runner, inside the method: the one import that goes up."""

MOST_ROOMS = 12
"""Files and folders in the package, private ones included, `__*` not."""

CORE = ["core/slots.py", "core/step.py", "core/client.py", "core/server.py"]
CORE_LINES = 525
"""Without docstrings, whose sections on arguments one looks up."""
METHODS = ["rules", "algorithms.py"]
LINES_PER_METHOD = 24


def name_of(path: Path) -> str:
    """`data.batches` for fedlesam/core/batches.py; a package is named after its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def target(module: str, name: str | None = None) -> str | None:
    """The file of this package behind `import module` or `from module import name`; None for others' packages."""
    if module.split(".")[0] != "fedlesam":
        return None
    if module == "fedlesam" and name == "__version__":
        return None
    inner = module.removeprefix("fedlesam").removeprefix(".")
    whole = ".".join(part for part in (inner, name) if part)
    return whole if whole in FILES else inner or "__init__"


def absolute(node: ast.ImportFrom, importer: str) -> str:
    """The module of a `from` import, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    path = FILES[importer]
    package = ["fedlesam", *path.relative_to(PACKAGE).parts[:-1]]
    return ".".join([*package[: len(package) - node.level + 1], *(node.module or "").split(".")]).rstrip(".")


def imports(importer: str, nodes: Iterator[ast.AST]) -> set[str]:
    found: set[str | None] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {target(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {target(absolute(node, importer), alias.name) for alias in node.names}
    return {name for name in found if name is not None}


def room(name: str) -> str:
    return name if name in ROOMS else name.split(".")[0]


@pytest.mark.parametrize("name", FILES)
def test_every_module_has_a_room(name: str) -> None:
    assert room(name) in ROOMS, f"put {room(name)!r} where it belongs in ROOMS of tests/test_house.py"


def test_every_room_is_there() -> None:
    assert {room(name) for name in FILES} >= set(ROOMS)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_one_way(name: str) -> None:
    """All of them: also those inside functions and those for type checkers."""
    for other in imports(name, ast.walk(ast.parse(FILES[name].read_text()))):
        allowed = ROOMS.index(room(other)) <= ROOMS.index(room(name)) or (name, other) == DOOR
        assert allowed, f"{name} must not import {other}"


def test_no_circles_inside_a_room() -> None:
    """Of imports at module level; those inside functions may reach back."""
    graph = {name: imports(name, iter(ast.parse(path.read_text()).body)) - {name} for name, path in FILES.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_imports_are_seen() -> None:
    """The reader of imports itself: it would pass everything if it found nothing."""
    found = imports("core.client", ast.walk(ast.parse(FILES["core.client"].read_text())))
    assert {"core.seeds", "core.checks", "core.batches", "core.slots"} <= found
    source = "import fedlesam.federation\nfrom fedlesam import data, Record\ndef f():\n    from .data import splits"
    assert imports("algorithms", ast.walk(ast.parse(source))) == {"federation", "data", "__init__", "data.splits"}


def lines_of(parts: list[str]) -> int:
    paths = [p for part in parts for p in ([PACKAGE / part] if part.endswith(".py") else (PACKAGE / part).glob("*.py"))]
    assert len(paths) >= 3
    return sum(1 for path in paths for line in path.read_text().splitlines() if line.strip())


def code_lines(source: str) -> int:
    """Lines that are neither blank nor part of a docstring."""
    bodies = [body for node in ast.walk(ast.parse(source)) if isinstance(body := getattr(node, "body", None), list)]
    texts = [n for body in bodies for n in body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    docs = {line for n in texts for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    return sum(1 for number, line in enumerate(source.splitlines(), 1) if line.strip() and number not in docs)


def test_the_core_stays_small() -> None:
    """What a reader of the local loop and the three slots has to read, in one sitting."""
    count = sum(code_lines((PACKAGE / part).read_text()) for part in CORE)
    assert 400 < count < CORE_LINES, f"the core has {count} lines of code"
    assert code_lines('"""One\n\ntwo."""\n\nx: int = 1\n"""Its."""\ndef f():\n    "Doc."\n    return x  # why\n') == 3


def test_a_method_stays_small() -> None:
    """Its rules, with their papers and formulas, and its line in the catalogue."""
    from fedlesam.algorithms import CATALOGUE

    each = lines_of(METHODS) / len(CATALOGUE)
    assert each < LINES_PER_METHOD, f"a method has {each:.1f} non-blank lines in the mean"


@pytest.mark.parametrize("content", [b"\x1f\x8b", b"PK"])
def test_ids_have_no_bytes(request: pytest.FixtureRequest, content: bytes) -> None:
    assert request.node.name == f"test_ids_have_no_bytes[content{content[:1] == b'P':d}]"

"""The house: imports go one way, and the core stays small enough to read in one sitting."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fedlesam"

ROOMS = [
    "checks",
    "runs.stats",
    "disk",
    "interrupt",
    "lock",
    "journal",
    "names",
    "space",
    "vectors",
    "seeds",
    "computing",
    "rules",
    "algorithms",
    "lookup",
    "models",
    "data",
    "local",
    "messages",
    "descent",
    "client",
    "reduction",
    "server",
    "evaluation",
    "store",
    "engines",
    "federation",
    "config",
    "evaluated",
    "checkpoint",
    "costs",
    "runs",
    "overview",
    "build",
    "probes",
    "runner",
    "trackers",
    "report",
    "compare",
    "runs.sweep",
    "runs.job",
    "runs.tune",
    "flower",
    "cli",
    "__main__",
    "__init__",
]
"""From the ground up, modules and packages: a room may import from rooms above it in this list, never from below."""

CORE = ["rules", "algorithms.py", "client.py", "server.py"]
CORE_LINES = 700


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
        assert ROOMS.index(room(other)) <= ROOMS.index(room(name)), f"{name} must not import {other}"


def test_no_circles_inside_a_room() -> None:
    """Of imports at module level; those inside functions may reach back."""
    graph = {name: imports(name, iter(ast.parse(path.read_text()).body)) - {name} for name, path in FILES.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_imports_are_seen() -> None:
    """The reader of imports itself: it would pass everything if it found nothing."""
    found = imports("client", ast.walk(ast.parse(FILES["client"].read_text())))
    assert {"seeds", "algorithms", "checks", "data.batches", "descent", "rules.base"} <= found
    source = "import fedlesam.federation\nfrom fedlesam import data, Record\ndef f():\n    from .data import batches"
    assert imports("client", ast.walk(ast.parse(source))) == {"federation", "data", "__init__", "data.batches"}


def test_the_core_stays_small() -> None:
    paths = [p for part in CORE for p in ([PACKAGE / part] if part.endswith(".py") else (PACKAGE / part).glob("*.py"))]
    lines = sum(1 for path in paths for line in path.read_text().splitlines() if line.strip())
    assert len(paths) >= 7
    assert lines < CORE_LINES, f"the core has {lines} non-blank lines"

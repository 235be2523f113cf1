"""Every public name says what it is, and what each of its parameters is.

A parameter is described in one of these places:

- under `Args` in the docstring of its function, of its class, or of the method that is overridden;
- where a name means the same everywhere, under `Arguments of the methods` in the docstring of its class or of a base
  class, or under `Arguments of the functions` in that of its module;
- a field of a class by a docstring of its own, a setting by its help, a hyper-parameter of a method by `PARAMETERS`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fedlesam.core.formulas import PARAMETERS

PACKAGE = Path(__file__).parent.parent / "fedlesam"
SECTION = re.compile(r"^(?:Args|Attributes|Arguments of the .*):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    \*{0,2}(\w+): \S", re.MULTILINE)
ELSEWHERE = {
    "forward",  # torch.nn.Module
    "emit",  # logging.Handler
    "log_message",  # http.server.BaseHTTPRequestHandler
    "convert",  # click.ParamType, and the next
    "shell_complete",
    "format_options",  # click.Command
    "configure_evaluate",  # flwr's Strategy, and the next
    "aggregate_evaluate",
}
"""Methods of classes of other packages, whose documentation describes their parameters."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A parsed module."""

    name: str
    tree: ast.Module

    @property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @property
    def imports(self) -> dict[str, tuple[str, str]]:
        found = [node for node in self.tree.body if isinstance(node, ast.ImportFrom)]
        return {a.asname or a.name: (node.module or "", a.name) for node in found for a in node.names}


House = dict[str, Module]


def read(package: Path) -> House:
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, ast.parse(path.read_text()))
    return modules


def bases(house: House, module: Module, kind: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
    """The classes of the package that a class derives from, itself first."""
    yield module, kind
    for base in kind.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        name = base.id if isinstance(base, ast.Name) else ""
        home, name = (module.name, name) if name in module.classes else module.imports.get(name, ("", name))
        if home in house and name in house[home].classes:
            yield from bases(house, house[home], house[home].classes[name])


def described(node: ast.AST | None) -> set[str]:
    """The names under the sections of a docstring that describe parameters."""
    text = ast.get_docstring(node) if isinstance(node, Function | ast.ClassDef | ast.Module) else None
    return {name for section in SECTION.findall(f"{text}\n") for name in ENTRY.findall(section)}


def parameters(function: Function) -> list[str]:
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *(a for a in (args.vararg, args.kwarg) if a)]
    return [a.arg for a in named if a.arg not in ("self", "cls") and not a.arg.startswith("_")]


def fields(kind: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Public fields, and whether each has a docstring or help of its own."""
    for node, after in zip(kind.body, [*kind.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            helped = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "option"
            yield node.target.id, text or helped


def is_public(node: ast.AST) -> bool:
    return isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")


def is_like(node: Function | ast.ClassDef, word: str) -> bool:
    """Whether a decorator, or a base, has this word."""
    given = [*node.decorator_list, *(node.bases if isinstance(node, ast.ClassDef) else [])]
    return any(word in ast.unparse(expression) for expression in given)


def missing_in_class(house: House, module: Module, kind: ast.ClassDef) -> Iterator[str]:
    where, line = f"{module.name}.{kind.name}", list(bases(house, module, kind))
    shared = set().union(*(described(base) for _, base in line))
    if any(is_like(kind, word) for word in ("dataclass", "NamedTuple", "TypedDict")):
        own = {name for _, base in line for name, said in fields(base) if said}
        yield from (f"{where}.{name}" for name, _ in fields(kind) if name not in shared | own)
    for method in (node for node in kind.body if isinstance(node, Function)):
        if method.name.startswith("_") and method.name != "__init__":
            continue
        heirs = [
            node for _, base in line for node in base.body if isinstance(node, Function) and node.name == method.name
        ]
        abroad = method.name in ELSEWHERE and len(line) <= len(kind.bases)
        if not abroad and method.name != "__init__" and not any(ast.get_docstring(node) for node in heirs):
            yield f"{where}.{method.name} has no docstring"
        known = shared.union(*(described(node) for node in heirs))
        if not abroad:
            yield from (f"{where}.{method.name}: {name}" for name in parameters(method) if name not in known)


def missing(house: House) -> Iterator[str]:
    """What is not described, of all public modules."""
    for module in house.values():
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        for node in module.tree.body:
            if not is_public(node):
                continue
            assert isinstance(node, Function | ast.ClassDef)
            if not ast.get_docstring(node):
                yield f"{module.name}.{node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                yield from missing_in_class(house, module, node)
            elif not is_like(node, "command("):  # its flags have help
                known = described(node) | described(module.tree)
                known |= PARAMETERS.keys() if module.name == "fedlesam.algorithms" else set()
                yield from (f"{module.name}.{node.name}: {name}" for name in parameters(node) if name not in known)


def test_everything_is_described() -> None:
    house = read(PACKAGE)
    assert len(house) > 200
    found = list(missing(house))
    assert not found, "\n".join(found)


SOURCE = '''
"""A module.

Arguments of the functions:
    shared: For all of them.
"""
@dataclass
class Base:
    """A base.

    Arguments of the methods:
        common: For all of them.
    """
    field: int
    """Described."""
    def method(self, one, common):
        """A method.

        Args:
            one: The first.
        """
class Net(nn.Module):
    """A network."""
    def forward(self, x): ...
def function(a, *b, shared, _hidden):
    """A function.

    Args:
        a: The first,
            in two lines.
        *b: The others.

    Returns:
        c: Not a parameter.
    """
'''


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", []),
        ("def g(c):\n    'Its c: no section.'", ["fedlesam.x.g: c"]),
        ("def g(): ...", ["fedlesam.x.g has no docstring"]),
        ("def _g(c): ...", []),
        ("class C(Base):\n    'An heir.'\n    def method(self, one, common): ...", []),
        ("class C(Base):\n    'An heir.'\n    def method(self, one, other): ...", ["fedlesam.x.C.method: other"]),
        ("class C:\n    'No heir.'\n    def method(self, one): 'Its doc.'", ["fedlesam.x.C.method: one"]),
        ("class C(Base):\n    'An heir.'\n    def forward(self, x): 'Its doc.'", ["fedlesam.x.C.forward: x"]),
        ("class C:\n    'A doc.'\n    def __init__(self, one): ...", ["fedlesam.x.C.__init__: one"]),
        ("@dataclass\nclass C(Base):\n    'An heir.'\n    field: int\n    more: int", ["fedlesam.x.C.more"]),
        ("@dataclass\nclass C:\n    'A doc.'\n    more: int = option(1, GROUP, 'help')", []),
        ("class C(NamedTuple):\n    'A doc.'\n    more: int", ["fedlesam.x.C.more"]),
    ],
    ids=range(12),
)
def test_what_is_missing_is_found(more: str, expected: list[str]) -> None:
    house = {"fedlesam.x": Module("fedlesam.x", ast.parse(SOURCE + more))}
    assert list(missing(house)) == expected

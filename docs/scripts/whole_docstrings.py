"""What the API reference shows of docstrings: what an override inherits, and parameters described in one place.

`tests/test_docstrings.py` says which places these are.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import griffe

from fedlesam.core.formulas import PARAMETERS

SECTION = re.compile(r"^(Args|Arguments of the .*):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    \*{0,2}(\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def described(text: str) -> dict[str, str]:
    """The parameters that a docstring describes, with their descriptions.

    Args:
        text: The docstring.
    """
    return {name: said for _, section in SECTION.findall(f"{text}\n") for name, said in ENTRY.findall(section)}


def text_of(found: griffe.Object) -> str:
    """The docstring of anything; empty where it has none.

    Args:
        found: A module, a class, or a member of one.
    """
    return found.docstring.value if found.docstring else ""


def put(found: griffe.Object, text: str) -> None:
    """Set the docstring of anything.

    Args:
        found: A module, a class, or a member of one.
        text: The docstring.
    """
    if found.docstring is None:
        found.docstring = griffe.Docstring(text, parent=found, parser="google")
    found.docstring.value = text


def add(found: griffe.Object, summary: str, more: Mapping[str, str]) -> None:
    """Give a function a docstring where it has none, and describe parameters that its own does not.

    Args:
        found: The function.
        summary: For one without a docstring.
        more: Descriptions by name; those of other functions, too.
    """
    text = text_of(found) or summary
    known = described(text)
    taken = {p.name: more[p.name] for p in found.parameters if p.name in more and p.name not in known}
    if taken and text:
        entries = "\n".join(f"    {name}: {said}" for name, said in taken.items())
        head = re.search(r"^Args:\n", text, re.MULTILINE)
        text = (
            f"{text[: head.end()]}{entries}\n{text[head.end() :]}" if head else f"{text.rstrip()}\n\nArgs:\n{entries}"
        )
    if text:
        put(found, text)


def members(found: griffe.Object, kind: str) -> Iterator[Any]:
    """The public members of one kind that are defined there.

    Args:
        found: A module or a class.
        kind: `module`, `class`, `function` or `attribute`.
    """
    for name, member in found.members.items():
        if not member.is_alias and member.kind.value == kind and not name.startswith("_"):
            yield member


class WholeDocstrings(griffe.Extension):
    """Completes docstrings once the package is read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when all modules are read.

        Args:
            pkg: The package.
        """
        self._complete(pkg)
        self._cut(pkg)

    def _complete(self, module: griffe.Module) -> None:
        shared = described(text_of(module))
        if module.path == "fedlesam.algorithms":
            shared |= {name: f"{said}." for name, said in PARAMETERS.items()}
        for function in members(module, "function"):
            add(function, "", shared)
        for kind in members(module, "class"):
            self._complete_class(kind)
        for inner in members(module, "module"):
            self._complete(inner)

    def _complete_class(self, kind: griffe.Class) -> None:
        line = [kind, *(base for base in kind.mro() if base.path.startswith("fedlesam."))]
        shared = {name: said for base in reversed(line) for name, said in described(text_of(base)).items()}
        for member in (*members(kind, "function"), *members(kind, "attribute")):
            heirs = [text_of(base.members[member.name]) for base in line[1:] if member.name in base.members]
            said = next((text for text in heirs if text), "")
            if member.is_function:
                inherited = {name: text for heir in reversed(heirs) for name, text in described(heir).items()}
                add(member, said, shared | inherited)
            elif said and not member.docstring:
                put(member, said)

    def _cut(self, found: griffe.Object) -> None:
        """Take away the lists of arguments that every method has for itself by now."""
        if text := text_of(found):
            text = SECTION.sub(lambda section: section[0] if section[1] == "Args" else "", f"{text}\n")
            put(found, text.rstrip())
        for inner in (*members(found, "module"), *members(found, "class")):
            self._cut(inner)

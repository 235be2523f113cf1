"""Packages whose names are imported when they are first used, so that `fedlesam --help` does not wait for PyTorch.

The names of such a package are in its stub, `__init__.pyi`: type checkers and editors read them there, too.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Its `__name__`.
        file: Its `__file__`; beside it is the stub that imports all public names.
    """
    imports = ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8")).body
    homes = {alias.name: node.module for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(str(homes[name])), name)

    return get, lambda: sorted(homes), sorted(homes)

"""The README for a package index, where links and pictures must be absolute. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
FILES = SOURCE.replace("//github.com/", "//raw.githubusercontent.com/")


def absolute(found: re.Match[str]) -> str:
    start, target = found[1], found[2]
    return f"{start}{FILES}/main/{target}" if start.startswith("!") else f"{start}{SOURCE}/blob/main/{target}"


readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)]+)", absolute, readme),
    long_description_content_type="text/markdown",
)

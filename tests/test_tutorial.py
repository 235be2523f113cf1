"""The tutorial and how-to pages: their files are written and their commands run, in order, each in an empty folder."""

import functools
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import fedlesam, in_fork

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {"tutorial": 9, "own-data": 3, "own-model": 2, "own-metric": 2, "resume": 4, "natural-clients": 1}
"""Each page, and the `sh` blocks that it has at least."""


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """The language, file name and text of the fenced blocks of a page."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', text, re.M | re.S)


def test_the_blocks_were_found() -> None:
    for page, least in PAGES.items():
        assert [kind for kind, _, _ in blocks_of(page)].count("sh") >= least
    names = {name for _, name, _ in blocks_of("tutorial") if name}
    assert names >= {"my_data.py", "my_model.py", "my_split.py", "my_rule.py"}


def run(command: str, folder: Path) -> tuple[int, str, str]:
    """`fedlesam` and Python scripts in a fork, which spares their imports; anything else in a shell."""
    words = shlex.split(command)
    if words[0] == "fedlesam":
        return fedlesam(folder, *words[1:]).wait()
    if words[0] == "python":
        return in_fork(folder, functools.partial(script, words[1]), words[1:2], {}).wait()
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def script(name: str) -> None:
    sys.path.insert(0, "")
    runpy.run_path(name, run_name="__main__")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_in_order(page: str, tmp_path: Path) -> None:
    for kind, name, content in blocks_of(page):
        if name:
            (tmp_path / name).write_text(content, encoding="utf-8")
            continue
        assert kind == "sh", f"a {kind} block without a file name"
        for command in content.strip().splitlines():
            command, _, target = command.partition(" > ")
            code, out, err = run(command, tmp_path)
            if target:
                (tmp_path / target).write_text(out, encoding="utf-8")
            assert code == 0, f"{command}\n{out}\n{err}"
            assert "Traceback" not in err
    if page == "tutorial":
        for made in ("runs/rho/accuracy.png", "runs/rho/split.png", "p3.png", "halves.png", "runs/scaled/accuracy.png"):
            assert (tmp_path / made).stat().st_size > 5000, made

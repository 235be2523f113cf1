"""The tutorial, executed: its files are written and its commands run, in its order, in one empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import fedlesam

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```(\w+)[ ]?([\w.]*)\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorial")


def test_the_blocks_were_found() -> None:
    assert [kind for kind, _, _ in BLOCKS].count("sh") >= 9
    assert {name for _, name, _ in BLOCKS if name} >= {"my_data.py", "my_model.py", "my_split.py", "my_rule.py"}


def run(command: str, folder: Path) -> tuple[int, str, str]:
    """`fedlesam` in a fork, which spares its imports; anything else in a shell."""
    words = shlex.split(command)
    if words[0] == "fedlesam":
        return fedlesam(folder, *words[1:]).wait()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_every_block_in_order(folder: Path) -> None:
    for kind, name, content in BLOCKS:
        if name:
            (folder / name).write_text(content, encoding="utf-8")
            continue
        assert kind == "sh", f"a {kind} block without a file name"
        for command in content.strip().splitlines():
            code, out, err = run(command, folder)
            assert code == 0, f"{command}\n{out}\n{err}"
            assert "Traceback" not in err
    for made in ("runs/rho/accuracy.png", "runs/rho/split.png", "p3.png", "halves.png", "runs/scaled/accuracy.png"):
        assert (folder / made).stat().st_size > 5000, made

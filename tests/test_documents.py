"""Documents: every relative link leads somewhere, every command parses, every file that is named is there."""

import ast
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest

from fedlesam.cli import cli
from reproduction.__main__ import command as reproduction

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "reproduction/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PROGRAMS = {"fedlesam", "python", "pytest", "make"}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The names that headings have on a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(name: str, text: str) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path
        missing = bool(path) and not target.exists()
        if missing or (anchor and anchor not in anchors(target.read_text(encoding="utf-8") if path else text)):
            yield link


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name: str) -> None:
    assert not list(broken(name, text_of(name)))


def test_broken_links_are_seen() -> None:
    page = "# A b\n[1](no-such.md) [2](#nowhere) [3](#a-b) [4](https://example.org/x) [5](docs/design.md#the-idea)"
    assert list(broken("README.md", page)) == ["no-such.md", "#nowhere"]


def blocks(text: str) -> str:
    """The lines of code blocks, fenced as `sh` or indented, long ones joined."""
    fenced = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (.*)$", FENCE.sub("", text), re.MULTILINE)
    return re.sub(r"\\\n\s*", " ", "\n".join([*fenced, *indented]))


def words_of(line: str) -> list[str] | None:
    """The command that a line of shell runs, from its program on; None if that is none of ours."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    if words[:1] in (["srun"], ["torchrun"]) and "-m" in words:
        words = words[words.index("-m") + 1 :]
    while words and (re.fullmatch(r"[A-Z_]+=\S*", words[0]) or words[0] == "nice"):
        words = words[1:]
    words = words[: words.index("&&")] if "&&" in words else words
    if not words:
        return None
    words[0] = words[0].removeprefix(".venv/bin/")
    return words if words[0] in PROGRAMS else None


def parse(command: click.Command, words: list[str], values: bool) -> None:
    """Raise what the command line would say to these words. Nothing is run and no file is opened.

    Args:
        command: a command or a group of them.
        words: what follows its name.
        values: whether the values of options are converted, too; in the text of a page they are often left out.
    """
    context = click.Context(command, help_option_names=["-h", "--help"])  # a command keeps what it is asked with first
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(context, words[0])
        if inner is None:
            raise click.UsageError(f"no command {words[0]!r}")
        return parse(inner, words[1:], values)
    options = {name: option for option in command.get_params(context) for name in option.opts + option.secondary_opts}
    if not values:
        for word in words:
            if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options:
                raise click.NoSuchOption(word)
        return None
    given, *_ = command.make_parser(context).parse_args(list(words))
    for option in command.get_params(context):
        if isinstance(option, click.Option) and option.name in given and not isinstance(option.type, click.Path):
            option.type_cast_value(context, given[option.name])
    return None


def check(words: list[str], values: bool) -> None:
    """Fail if a command of ours does not parse, or names a script, a test or a target that is not there."""
    program, *rest = words
    if program == "fedlesam":
        parse(cli, rest, values)
    elif program == "make":
        assert set(rest) <= TARGETS, f"no target {rest}"
    elif program == "pytest":
        named = [word for word in rest if word.startswith("tests/")]
        assert all((ROOT / word.partition("::")[0]).exists() for word in named), f"no test {named}"
    elif rest[:2] == ["-m", "reproduction"]:
        parse(reproduction, rest[2:], values)
    elif rest and re.match(r"(tests|benchmarks|docs|examples)/", rest[0]):
        assert (ROOT / rest[0]).exists(), f"no script {rest[0]}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_parses(name: str) -> None:
    text = text_of(name)
    for line in blocks(text).splitlines():
        words = words_of(line)
        if words is not None:
            check_and_show(words, True, line)
    for span in SPAN.findall(FENCE.sub("", text)):
        words = words_of(" ".join(span.split()))
        if words is not None:
            check_and_show(words, False, span)


def check_and_show(words: list[str], values: bool, line: str) -> None:
    try:
        check(words, values)
    except (click.ClickException, AssertionError, ValueError) as error:
        pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize(
    "line",
    [
        "fedlesam run --no-such-option 3",
        "fedlesam walk",
        "fedlesam run --rounds many",
        "python -m reproduction table2 --scales cpu",
        "python benchmarks/no_such.py",
        "make no-such",
        "pytest tests/test_no_such.py",
    ],
)
def test_wrong_commands_are_seen(line: str) -> None:
    words = words_of(line)
    assert words is not None
    with pytest.raises((click.ClickException, AssertionError, ValueError)):
        check(words, True)


def test_documents_name_no_machine() -> None:
    texts = [*(ROOT / name for name in DOCUMENTS), *ROOT.glob("examples/*.py")]
    for path in texts:
        assert not re.search(r"(?<![\w.])/(work|home|root|tmp|Users)/", path.read_text(encoding="utf-8")), path


def modules_named(text: str) -> set[str]:
    """Modules, folders and patterns of the package in the tables of the design."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    return set(re.findall(r"`([\w*/]+(?:\.py|/))`", rows))


def test_the_design_names_every_module() -> None:
    package, named = ROOT / "fedlesam", modules_named(text_of("docs/design.md"))
    present = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if not path.name.startswith("__")}
    missing = {name for name in present if not any(fnmatch(name, one + "*" * one.endswith("/")) for one in named)}
    gone = {one for one in named if not any(fnmatch(name, one + "*" * one.endswith("/")) for name in present)}
    assert (missing, gone) == (set(), set()), "bring the tables of docs/design.md up to date"


def definitions(path: Path) -> set[str]:
    """Functions and classes of a file, and methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_the_design_says_where_things_are() -> None:
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", text_of("docs/design.md"))
    assert len(places) >= 15
    for path, name in places:
        assert name in definitions(ROOT / "fedlesam" / path), f"docs/design.md: {path} has no {name}"

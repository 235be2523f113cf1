"""Pages of the site that are not files of docs/: the README and its like, and the API reference from the docstrings.

MkDocs calls the functions named `on_...`. A link that leaves docs/ leads to the page made here, else to the repository.
"""

import json
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fedlesam.algorithms import CONTROLS, FAMILY, OTHERS, PAPER
from fedlesam.core.formulas import PARAMETERS
from fedlesam.runs.explain import explain

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "reproduction/README.md": "reproduction.md",
    "examples/flower-cifar/README.md": "example-flower-cifar.md",
}
"""Documents outside docs/, and the pages they become."""

ROOMS = {
    "fedlesam": "",
    "algorithms": "algorithms",
    "rules": "rules",
    "data": "data",
    "models": "models",
    "probes": "probes",
    "runs": "runs",
    "flower": "flower",
}
"""Pages of the API reference, and the modules they describe."""

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
"""Each becomes a page with what its cells showed."""

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def repository() -> str:
    """The address under which the files of the repository can be read."""
    urls: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    return urls["Source"]


def relinked(text: str, home: str, page: str) -> str:
    """A document's text with links that are right on its page.

    Args:
        text: of the document.
        home: the folder of the document in the repository.
        page: the page's place on the site.
    """

    def link(found: re.Match[str]) -> str:
        start, path, anchor, end = found.groups()
        if re.match(r"[a-z]+:", path):
            return found[0]
        target = posixpath.normpath(posixpath.join(home, path))
        if target in PAGES:
            target = PAGES[target]
        elif target.startswith("docs/") and (ROOT / target).is_file():
            target = target.removeprefix("docs/").replace(".ipynb", ".md")
        else:
            return f"{start}{repository()}/blob/main/{target}{anchor or ''}{end}"
        return f"{start}{posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor or ''}{end}"

    return LINK.sub(link, text)


def public_names(module: griffe.Module) -> Iterator[str]:
    """Where the public names of a module are defined: what it imports from the package, or else defines itself."""
    for name, member in module.members.items():
        if name.startswith("_") or name == "lazy":
            continue
        if module.path == "fedlesam.algorithms" and member.is_alias and name != "Algorithm":
            continue  # rules, which have a page of their own
        if member.is_alias:
            if str(member.target_path).startswith("fedlesam.") and not member.final_target.is_module:
                yield member.final_target.path
        elif not member.is_module:
            yield member.path
        elif module.imports.get(name) == f"{member.path}.{name}":  # a function hides the module it is defined in
            yield f"{member.path}.{name}"


def place(path: str) -> tuple[bool, bool]:
    """The order of names on a page: `Federation`, classes, functions."""
    name = path.rpartition(".")[2]
    return name != "Federation", name[0].islower()


def reference(package: griffe.Module, room: str) -> str:
    """The reference page of one module."""
    module = package[ROOMS[room]] if ROOMS[room] else package
    names = sorted(dict.fromkeys(public_names(module)), key=place)
    blocks = [f"::: {path}" for path in names]
    docstring = module.docstring.value if module.docstring else ""
    lead, _, example = docstring.partition("\n\n")
    if room == "algorithms":
        example = ""
        lead += "\n\n| hyper-parameter | meaning |\n|---|---|\n"
        lead += "\n".join(f"| `{name}` | {meaning} |" for name, meaning in PARAMETERS.items())
    fenced = f"\n```python\n{example.strip()}\n```\n" if example else ""
    return "\n\n".join([f"# {module.path}", lead, fenced, *blocks])


def methods() -> str:
    """The catalogue: what `fedlesam explain` says of every method."""
    groups = {"The paper's twelve": PAPER, "More of the family": (*OTHERS, *FAMILY), "Controls and placebos": CONTROLS}
    parts = ["# The methods", "What `fedlesam explain NAME` prints, made from the code."]
    for title, makers in groups.items():
        parts.append(f"## {title}")
        for make in makers:
            name = make.__name__.replace("_", "-")
            parts.append(f"### {name}\n\n```text\n{explain(name).text()}\n```")
    return "\n\n".join(parts)


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its texts, its code, and what the code showed.

    Args:
        notebook: As it is in its file.
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _shown(output))]
    return "\n\n".join(parts)


def _shown(output: dict[str, Any]) -> str:
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "image/png" in data:
        return (
            f'<img alt="The picture that the code above draws" src="data:image/png;base64,{data["image/png"].strip()}">'
        )
    if "text/html" in data:
        return f'<div class="output">{data["text/html"]}</div>'
    text = data.get("text/plain") or "".join(output.get("text", ""))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for document, page in PAGES.items():
        if (ROOT / document).exists():
            text = (ROOT / document).read_text(encoding="utf-8")
            content = relinked(text, posixpath.dirname(document), page)
            files.append(File.generated(config, page, content=content))
    for path in NOTEBOOKS:
        page = f"notebooks/{path.stem}.md"
        text = notebook_page(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, page, content=relinked(text, "docs/notebooks", page)))
    files.append(File.generated(config, "methods.md", content=methods()))
    package: Any = griffe.load("fedlesam", search_paths=[ROOT], resolve_aliases=True)
    for room in ROOMS:
        files.append(File.generated(config, f"api/{room}.md", content=reference(package, room)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set right the links of a page that leave docs/."""
    if page.file.generated_by is not None:
        return markdown
    place = page.file.src_uri
    return relinked(markdown, posixpath.dirname(f"docs/{place}"), place)

"""Execute the notebooks of docs/notebooks and keep what they show.

    python docs/scripts/notebooks.py            # all, in place
    python docs/scripts/notebooks.py --check    # execute them, write nothing

Needs `pip install 'fedlesam[notebooks]'`. What differs from run to run (seconds, identifiers) is left out of the files.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TIMING = re.compile(r"\s+(?:\d+ (?:h|min|s)\s?)+ left")


def executed(path: Path) -> Any:
    """The notebook with its output, executed in an empty folder by this Python.

    Args:
        path: The notebook.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        kernel = {"kernel_name": "python3", "resources": {"metadata": {"path": folder}}}
        NotebookClient(notebook, timeout=600, record_timing=False, **kernel).execute()
    for cell in notebook.cells:
        cell.pop("id", None)
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
            output.get("transient", {}).clear()
            for kind, text in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = TIMING.sub("", text)
    notebook.metadata.clear()
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.nbformat_minor = 4
    return notebook


def main() -> None:
    """The command."""
    import nbformat

    parser = argparse.ArgumentParser(description="Execute the notebooks of docs/notebooks.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = executed(path)
        print(path.name)
        if not check:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()

"""The folder of a Flower app: what its pyproject.toml says."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = ("rounds", "num-server-rounds")
"""The settings under which apps have their number of rounds: ours, and that of Flower's templates."""


@dataclass(frozen=True)
class App:
    """A Flower app."""

    folder: Path
    """With its pyproject.toml."""
    components: dict[str, Any]
    """Where its ServerApp and its ClientApp are, as module:name."""
    config: dict[str, Any]
    """The settings of a run and their defaults."""

    @property
    def pyproject(self) -> Path:
        """The file that all of this is from."""
        return self.folder / "pyproject.toml"

    @property
    def clients(self) -> int | None:
        """The number of clients, if it is a setting."""
        found = self.config.get("clients")
        return found if type(found) is int else None

    def file_of(self, component: str) -> Path | None:
        """The file of a component; None if there is none.

        Args:
            component: "serverapp" or "clientapp".
        """
        module = str(self.components.get(component, "")).partition(":")[0].replace(".", "/")
        found = [self.folder / f"{module}.py", self.folder / module / "__init__.py"] if module else []
        return next((file for file in found if file.exists()), None)


def read_app(folder: Path) -> App:
    """Read the folder of a Flower app; a ValueError if it is none.

    Args:
        folder: with its pyproject.toml.
    """
    path = folder / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: is not the pyproject.toml of a Flower app: {error}") from error
    flower = table.get("tool", {}).get("flwr", {}).get("app", {})
    if not flower:
        raise ValueError(f"{path}: has no [tool.flwr.app]: is this the folder of a Flower app?")
    return App(folder, dict(flower.get("components", {})), dict(flower.get("config", {})))

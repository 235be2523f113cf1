"""The server's state on disk: safetensors files that are never changed, and one JSON file that names them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as as_bytes

from fedlesam.core.messages import unshare
from fedlesam.core.server import ServerState
from fedlesam.flower.files import write
from fedlesam.flower.records import unpack
from fedlesam.flower.tally import Kept, Tally, load_checked

FORMAT = 1
INDEX = "checkpoint.json"
GROUPS = ("buffers", "perturbation", "correction", "server")


@dataclass(frozen=True)
class Checkpoint:
    """All that a ServerApp needs to go on."""

    about: Mapping[str, Any]
    """What must be the same when it goes on."""
    state: ServerState
    used: Mapping[int, str]
    """By client, the ticket of its last answer that was used."""
    tally: Tally
    rounds: list[dict[str, Any]]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """The index is replaced last: until then the folder holds the round before, whole."""
    state = checkpoint.state
    named = {"weights": state.weights}
    named |= {f"{group}.{name}": value for group in GROUPS for name, value in getattr(state, group).items()}
    content = as_bytes(unshare({name: value.cpu() for name, value in named.items()}))
    digest = hashlib.sha256(content).hexdigest()
    kept = Kept(f"state-round{state.round:06d}-{digest[:8]}.safetensors", digest)
    write(folder / kept.file, content)
    clients = {client: entry for client, entry in checkpoint.tally.clients.items() if isinstance(entry, Kept)}
    index = {
        "format": FORMAT,
        "about": dict(checkpoint.about),
        "round": state.round,
        "state": asdict(kept),
        "used": {str(client): ticket for client, ticket in sorted(checkpoint.used.items())},
        "clients": {str(client): asdict(entry) for client, entry in sorted(clients.items())},
        "rounds": checkpoint.rounds,
    }
    body = json.dumps(index, sort_keys=True, allow_nan=False)
    whole = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "checkpoint": index}
    write(folder / INDEX, json.dumps(whole, indent=1, allow_nan=False).encode())
    named_files = {kept.file, *(entry.file for entry in clients.values())}
    for pattern in ("state-round*.safetensors", "client*-round*.safetensors", "*.part"):
        for file in folder.glob(pattern):
            if file.name not in named_files:
                file.unlink(missing_ok=True)


def load(folder: Path, about: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of this folder, None if there is none; a ValueError if it is another run's or damaged."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        index = whole["checkpoint"]
        good = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest() == whole["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is not a checkpoint: {error}") from error
    if not good or index["format"] != FORMAT:
        raise ValueError(
            f"{path}: is damaged or of another version; restore it from a copy, or start in an empty folder"
        )
    differences = [
        f"{k}: {v!r} here, {index['about'].get(k)!r} there" for k, v in about.items() if index["about"].get(k) != v
    ]
    if differences:
        raise ValueError(f"{folder}: holds another run ({'; '.join(differences)}); choose another folder")
    named = load_checked(folder / index["state"]["file"], index["state"]["sha256"])
    state = ServerState(index["round"], named["weights"], *(unpack(named, group) for group in GROUPS))
    tally = Tally(folder, {int(client): Kept(**entry) for client, entry in index["clients"].items()})
    used = {int(client): ticket for client, ticket in index["used"].items()}
    return Checkpoint(about, state, used, tally, index["rounds"])

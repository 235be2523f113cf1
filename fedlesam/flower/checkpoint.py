"""The server's state on disk: safetensors files that are never changed, and one JSON file that names them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlesam.core import disk
from fedlesam.core.server import ServerState
from fedlesam.flower.client_sums import REMEDY, ClientSums, StateFile

FORMAT = 1
INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """All that a ServerApp needs to resume."""

    metadata: Mapping[str, Any]
    """The settings that must be the same when the run is resumed."""
    state: ServerState
    """The global model and the rules' state."""
    used: Mapping[int, str]
    """By client, the ticket of its last answer that was used."""
    sums: ClientSums
    """What the server needs if a client loses its memory."""
    rounds: list[dict[str, Any]]
    """A record for each round done."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint. The index is replaced last: until then the folder holds the round before.

    Args:
        folder: of the run.
        checkpoint: the state after a round.
    """
    state = checkpoint.state
    written = StateFile.write(folder, f"state-round{state.round:06d}-{{digest}}.safetensors", state.flatten())
    clients = {client: sums for client, sums in checkpoint.sums.clients.items() if isinstance(sums, StateFile)}
    index = {
        "format": FORMAT,
        "metadata": dict(checkpoint.metadata),
        "round": state.round,
        "state": asdict(written),
        "used": {str(client): ticket for client, ticket in sorted(checkpoint.used.items())},
        "clients": {str(client): asdict(sums) for client, sums in sorted(clients.items())},
        "rounds": checkpoint.rounds,
    }
    body = json.dumps(index, sort_keys=True, allow_nan=False)
    whole = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "checkpoint": index}
    disk.write_bytes(folder / INDEX, json.dumps(whole, indent=1, allow_nan=False).encode())
    named = {written.file, *(sums.file for sums in clients.values())}
    for pattern in ("state-round*.safetensors", "client*-round*.safetensors", f"*{disk.PART}"):
        for file in [file for file in folder.glob(pattern) if file.name not in named]:
            file.unlink(missing_ok=True)


def load(folder: Path, metadata: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of a folder; None if there is none, a ValueError if it is damaged or of another run.

    Args:
        folder: of the run.
        metadata: the settings of the run that is to be resumed.
    """
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
        raise ValueError(f"{path}: is damaged or of another version; {REMEDY}")
    saved = index["metadata"] if "metadata" in index else index["about"]  # earlier versions
    differences = [
        f"{k}: you gave {v!r}, the folder has {saved.get(k)!r}" for k, v in metadata.items() if saved.get(k) != v
    ]
    if differences:
        raise ValueError(f"{folder}: holds another run ({'; '.join(differences)}); choose another folder")
    state = ServerState.unflatten(index["round"], StateFile(**index["state"]).read(folder))
    sums = ClientSums(folder, {int(client): StateFile(**entry) for client, entry in index["clients"].items()})
    used = {int(client): ticket for client, ticket in index["used"].items()}
    return Checkpoint(metadata, state, used, sums, index["rounds"])

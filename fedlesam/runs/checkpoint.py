"""Crash-safe save and resume: a round becomes visible whole or not at all.

A checkpoint is a manifest (JSON) that names the server's state, the clients' memories and how far the journals go, each
with its size and SHA-256. All of that is written and synced first; renaming the manifest into its place is the commit.
Each checkpoint writes the memories that changed into one segment, a file that is never changed; of the segments before,
those stay of which at least half is still current. What no kept manifest names is deleted after the next commit.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fedlesam.core import disk
from fedlesam.core.disk import Damaged, FileDigest, check_digest
from fedlesam.core.names import one_line
from fedlesam.core.server import ServerState
from fedlesam.core.space import cannot_write
from fedlesam.core.state import UNREADABLE, load, save, size_in_bytes
from fedlesam.engines.base import Saved
from fedlesam.engines.segments import NAME
from fedlesam.engines.store import anchor_file, client_file
from fedlesam.federation import Federation
from fedlesam.runs.config import changes
from fedlesam.runs.journal import Journal

FORMATS = (1, 2)
"""The first named a file for each client. It is read, and the next checkpoint is of the second."""
PREVIOUS = "previous"
"""The model of the round before, in the file of the server's state."""
NEWER = (("steps", None), ("optimizer", "sgd"))
"""Settings of LocalTraining with the values that older checkpoints had without naming them."""
MANIFEST = re.compile(r"round\d{6,}\.json")

log = logging.getLogger("fedlesam")


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint consists of."""

    run: dict[str, str]
    """What must be the same when the run is resumed, by name."""
    round: int
    """Rounds done."""
    state: FileDigest
    """The file of the server's state."""
    journals: dict[str, FileDigest]
    """The files of JSON lines, up to this round, by name."""
    memories: dict[str, FileDigest]
    """The files of clients' memories, by name."""
    clients: dict[int, int] | None = None
    """client -> the round its memory is of, in the first format; later segments say it themselves."""

    @property
    def nbytes(self) -> int:
        """Of the state and the memories."""
        return self.state.size + sum(digest.size for digest in self.memories.values())

    def dump(self) -> str:
        """The manifest as JSON, with its checksum."""
        body = {"format": 2 if self.clients is None else 1, **asdict(self)}
        if self.clients is None:
            del body["clients"]
        text = json.dumps(body, sort_keys=True)
        return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": body}, sort_keys=True)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Accepts nothing but what `dump` wrote, to the byte.

        Args:
            path: The manifest's file.
        """
        try:
            text = path.read_text(encoding="utf-8")
            body = json.loads(text)["checkpoint"]
            if (format := body.pop("format")) not in FORMATS:
                raise ValueError("it has another format")
            manifest = cls(
                run=body["run"],
                round=body["round"],
                state=FileDigest(**body["state"]),
                journals={name: FileDigest(**seal) for name, seal in body["journals"].items()},
                memories={name: FileDigest(**seal) for name, seal in body["memories"].items()},
                clients={int(c): round for c, round in body["clients"].items()} if format == 1 else None,
            )
            if manifest.dump() != text:
                raise ValueError("its checksum is wrong")
            manifest.check(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{path}: is damaged: {error}") from error
        return manifest

    def check(self, path: Path) -> None:
        """The form of what has the right checksum, so that no number or name in it can lead anywhere else.

        Args:
            path: The manifest's file.
        """
        digests = [self.state, *self.journals.values(), *self.memories.values()]
        clients = self.clients or {}
        numbers = [self.round, *clients, *clients.values(), *(digest.size for digest in digests)]
        texts = [*self.run.values(), *(seal.sha256 for seal in digests)]
        if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(text, str) for text in texts):
            raise ValueError("it is not the manifest of a checkpoint")
        if path.name != manifest_file(self.round) or any(round >= self.round for round in clients.values()):
            raise ValueError("it belongs to another round")
        if self.clients is None:
            ours = all((found := NAME.fullmatch(name)) and int(found[1]) <= self.round for name in self.memories)
        else:
            files = {client_file(round, client) for client, round in clients.items()}
            ours = self.memories.keys() <= files | {anchor_file(round) for round in clients.values()}
        if not ours:
            raise ValueError("it names files that do not belong to clients")


class Checkpoints:
    """The checkpoints of one federation in a folder.

    Args:
        folder: The folder.
        keep: How many are kept.
        journals: Files that are cut back to a checkpoint when it is loaded.
        metadata: What else must be the same to resume.
        older: The `settings` of that as earlier versions wrote them.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        journals: Mapping[str, Journal] | None = None,
        metadata: Mapping[str, str] | None = None,
        older: str | None = None,
    ) -> None:
        self.folder, self.keep, self.older = folder, keep, older
        self.journals, self.metadata = dict(journals or {}), dict(metadata or {})
        self.chain: list[Manifest] = []
        """Those there are, the newest last."""
        self.records: dict[str, list[dict[str, Any]]] = {}
        """What the journals held when they were begun."""
        self.previous: Tensor | None = None
        """The global model of the round before the checkpoint that was read last, where it was saved with it."""

    @property
    def clients(self) -> Path:
        """The folder of the clients' memories."""
        return self.folder / "clients"

    def found(self) -> list[Path]:
        """The manifests, the newest first."""
        paths = [path for path in self.folder.glob("round*.json") if MANIFEST.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True)

    def rounds(self) -> list[int]:
        """The rounds after which there are manifests, the newest first."""
        return [int(path.stem.removeprefix("round")) for path in self.found()]

    def save(self, federation: Federation, previous: Tensor | None = None) -> None:
        """Commit the federation's last round; with the global model before it, where somebody will ask for that.

        Args:
            federation: The federation.
            previous: The global model of the round before.
        """
        state = federation.state
        if self.chain and self.chain[-1].round == state.round:
            return
        known = self.chain[-1].memories if self.chain else {}
        tensors = state.flatten() | ({PREVIOUS: previous} if previous is not None else {})
        try:
            disk.make_folder(self.clients)
            saved = federation.save_memories(self.clients, known)
            save(self._state(state.round), tensors, sync="file")
            manifest = Manifest(
                run=describe(federation) | self.metadata,
                round=state.round,
                state=disk.digest_of(self._state(state.round)),
                journals={name: journal.seal() for name, journal in self.journals.items()},
                memories=saved.digests,
            )
            disk.write_text(self._manifest(state.round), manifest.dump(), first=(self.clients, self.folder))
        except (OSError, SafetensorError) as error:
            needed = max(size_in_bytes(tensors), self.chain[-1].nbytes if self.chain else 0)
            fewer = "take fewer checkpoints: a larger --checkpoint-every, --keep 1"
            raise OSError(cannot_write("a checkpoint", self.folder, error, needed, fewer)) from error
        self.chain.append(manifest)
        self._prune(federation)

    def load(self, federation: Federation) -> int:
        """Put the federation where the newest good checkpoint is, and return its round; 0 if there is none.

        Args:
            federation: One made from the same settings.
        """
        paths, wrong = self.found(), ""
        for number, path in enumerate(paths):
            try:
                manifest = Manifest.read(path)
                self._check_run(federation, manifest, path)
                state, previous = self._read_state(manifest, federation.state)
                if manifest.journals.keys() != self.journals.keys():
                    raise Damaged(f"{path}: is damaged: it has other journals than {', '.join(self.journals)}")
                for name, journal in self.journals.items():
                    journal.check(manifest.journals[name])
                federation.restore(state, self.clients, Saved(manifest.memories, manifest.clients))
            except Damaged as error:
                wrong = str(error)
                log.warning("%s; using the previous checkpoint", error)
                continue
            self.previous = previous
            self.chain = [*reversed(self._readable(federation, paths[number + 1 :])), manifest]
            self._begin(manifest.journals)
            self._unlink(paths[:number])
            self._collect(federation)
            return manifest.round
        if paths:
            raise ValueError(
                f"{self.folder}: none of its {len(paths)} checkpoints can be used (the oldest: {wrong}); "
                "repair the folder, or start the run again with --overwrite"
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder}: is not a folder, but checkpoints go there; move it away")
        self._begin({})
        self._collect(federation)
        return 0

    def read_newest(self, federation: Federation, memories: bool = False) -> bool:
        """Put the federation where the newest good checkpoint is; False if there is none. The folder stays as it is.

        Args:
            federation: The federation.
            memories: Whether to load what clients remember, too.
        """
        for path in self.found():
            try:
                manifest = Manifest.read(path)
                state, self.previous = self._read_state(manifest, federation.state)
                if memories:
                    self._check_run(federation, manifest, path)
                    federation.restore(state, self.clients, Saved(manifest.memories, manifest.clients))
                federation.state = state
                return True
            except Damaged as error:
                log.warning("%s; reading the previous checkpoint", error)
        return False

    def state_at(self, round: int, like: ServerState) -> ServerState | None:
        """The server's state after so many rounds, where a good checkpoint has it.

        Args:
            round: Rounds done.
            like: A state of the same model.
        """
        try:
            return self._read_state(Manifest.read(self._manifest(round)), like)[0]
        except Damaged:
            return None

    def _begin(self, digests: Mapping[str, FileDigest]) -> None:
        self.records = {name: journal.begin(digests.get(name)) for name, journal in self.journals.items()}

    def _manifest(self, round: int) -> Path:
        return self.folder / manifest_file(round)

    def _state(self, round: int) -> Path:
        return self.folder / f"round{round:06d}.safetensors"

    def _readable(self, federation: Federation, paths: list[Path]) -> list[Manifest]:
        found = []
        for path in paths:
            try:
                manifest = Manifest.read(path)
                self._check_run(federation, manifest, path)
                found.append(manifest)
            except ValueError as error:
                log.warning("%s", error)
        return found

    def _check_run(self, federation: Federation, manifest: Manifest, path: Path) -> None:
        known = {"data": self.metadata.get("data", "")} | manifest.run  # older ones do not say it
        same = {"settings": self.older} if self.older and known.get("settings") == self.older else {}
        changed = changes({"data": ""} | describe(federation) | self.metadata | same, known)
        if changed:
            remedy = "use the settings, data and version of fedlesam that began it, or start again with --overwrite"
            raise ValueError(one_line(f"{path}: is a checkpoint of another run ({'; '.join(changed)}); {remedy}"))

    def _read_state(self, manifest: Manifest, like: ServerState) -> tuple[ServerState, Tensor | None]:
        path, device = self._state(manifest.round), like.weights.device
        check_digest(path, manifest.state)
        try:
            tensors, _ = load(path, device)
            previous = tensors.pop(PREVIOUS, None)
            state = ServerState.unflatten(manifest.round, tensors)
            if forms({"": state.weights, **state.buffers}) != forms({"": like.weights, **like.buffers}):
                raise ValueError("it belongs to another model")
            if previous is not None and forms({"": previous}) != forms({"": state.weights}):
                raise ValueError("the previous model has another shape")
        except UNREADABLE as error:
            raise Damaged(one_line(f"{path}: is damaged: {error}")) from error
        return state, previous

    def _prune(self, federation: Federation) -> None:
        """Forget all but the newest; manifests go first, so that none is left without its files."""
        self.chain = self.chain[-self.keep :]
        kept = {self._manifest(manifest.round) for manifest in self.chain}
        self._unlink([path for path in self.found() if path not in kept])
        self._collect(federation)

    def _unlink(self, manifests: list[Path]) -> None:
        for path in manifests:
            if not path.is_dir():
                path.unlink(missing_ok=True)

    def _collect(self, federation: Federation) -> None:
        """Delete what no manifest names, also what an interrupted commit left."""
        files = [file(manifest.round).name for manifest in self.chain for file in (self._manifest, self._state)]
        disk.collect(self.folder, files)
        federation.collect_memories(self.clients, {name for manifest in self.chain for name in manifest.memories})


def manifest_file(round: int) -> str:
    """The name of a manifest.

    Args:
        round: Rounds done.
    """
    return f"round{round:06d}.json"


def forms(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Shapes and types by name.

    Args:
        tensors: Tensors by name.
    """
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def describe(federation: Federation) -> dict[str, str]:
    """What a federation computes, in words that are the same in every process.

    Args:
        federation: The federation.
    """
    local, failures = federation.local, federation.failures
    settings = {field.name: getattr(local, field.name) for field in fields(local)}
    settings = {name: value for name, value in settings.items() if (name, value) not in NEWER}
    return {
        "algorithm": _words(federation.algorithm),
        **{f"local.{name}": _words(value) for name, value in settings.items()},
        "clients": str(len(federation.clients)),
        "active": str(federation.active),
        "parameters": str(federation.state.weights.numel()),
        "seed": str(federation.seed),
        "weighting": federation.weighting,
        **({} if federation.sampling is None else {"sampling": _words(federation.sampling)}),
        "failures": f"dropout {failures.dropout}, {failures.on_error}, {failures.max_update_norm}",
    }


def _words(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", getattr(value, "__qualname__", repr(value)))

"""The producers of a round in the arena of a host: their addresses, their secret, and how they fail.

The first rank of the host starts the producers, or reads where they run. Its data loader and the other ranks ask them.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.contracts.files.whole_files import write_private
from megatrain.data.pictures.picture_source import Producers
from megatrain.peers.link import PeerAddress

PRODUCERS_SCHEMA_VERSION = 1
_DAMAGE = "the arena is damaged; remove its directory, and the job restarts from storage"


class ProducersFile(Closable):
    """The file that names producers for the processes of this host, until `close` removes it. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._producers: Producers | None = None

    def name(self, producers: Producers) -> None:
        """Write the producers and their failures. Raises: CheckpointError naming the file."""
        with self._lock:
            self._producers = producers
            self._write(producers)

    def update(self) -> None:
        """Write the failures again, if producers are named. If the disk is full, the earlier file remains."""
        with self._lock, suppress(CheckpointError):
            if self._producers is not None:
                self._write(self._producers)

    def close(self) -> None:
        with self._lock:
            self._producers = None
            self._path.unlink(missing_ok=True)

    def _write(self, producers: Producers) -> None:
        content = {
            "schema_version": PRODUCERS_SCHEMA_VERSION,
            "addresses": [str(address) for address in producers.addresses],
            "secret": producers.secret.hex(),
            "problem": producers.problem(),
            "failure": producers.failure(),
        }
        try:
            write_private(self._path, json.dumps(content).encode())
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {error.strerror}") from error


def read_producers(path: Path) -> Producers:
    """Return the producers in a file. Their problem and failure are read from it again whenever they are needed.

    Raises: CheckpointError naming the file.
    """
    read = _read(path)
    return Producers(
        [PeerAddress.parse(text) for text in read.texts("addresses")],
        bytes.fromhex(read.text("secret")),
        lambda: _text(path, "problem"),
        lambda: _text(path, "failure"),
    )


def _text(path: Path, key: str) -> str:
    try:
        return _read(path).text(key)
    except CheckpointError as error:
        # if the file is gone, the first rank of the host has ended: its failure is the cause, so none is named here
        return str(error) if path.exists() else ""


def _read(path: Path) -> JsonObject:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return JsonObject.parse(content, str(path), PRODUCERS_SCHEMA_VERSION, _DAMAGE)

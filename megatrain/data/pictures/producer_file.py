"""The producers of a round in the arena of a host: their addresses, their secret, and why none of them can answer.

The first rank of the host starts the producers, or reads where they run. Its data loader and the other ranks ask them.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.contracts.files.whole_files import write_private
from megatrain.data.pictures.picture_source import Producers
from megatrain.peers.link import PeerAddress

PRODUCERS_SCHEMA_VERSION = 1
_DAMAGE = "the arena is damaged; remove its directory, and the job restarts from storage"


def write_producers(path: Path, producers: Producers, problem: str = "") -> None:
    """Write producers for the processes of this host. problem: why none of them can ever answer; empty if one may.

    Raises: CheckpointError naming the file.
    """
    content = {
        "schema_version": PRODUCERS_SCHEMA_VERSION,
        "addresses": [str(address) for address in producers.addresses],
        "secret": producers.secret.hex(),
        "problem": problem,
    }
    try:
        write_private(path, json.dumps(content).encode())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error


def read_producers(path: Path) -> Producers:
    """Return the producers in a file. While they are used, their problem is read from it again.

    Raises: CheckpointError naming the file.
    """
    read = _read(path)
    return Producers(
        [PeerAddress.parse(text) for text in read.texts("addresses")],
        bytes.fromhex(read.text("secret")),
        lambda: _problem(path),
    )


def _problem(path: Path) -> str:
    try:
        return _read(path).text("problem")
    except CheckpointError as error:
        # without the file, the first rank of the host has ended: its failure matters, not that of those who wait
        return str(error) if path.exists() else ""


def _read(path: Path) -> JsonObject:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return JsonObject.parse(content, str(path), PRODUCERS_SCHEMA_VERSION, _DAMAGE)

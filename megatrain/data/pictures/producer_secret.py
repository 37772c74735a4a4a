"""The file of the secret with which producers on other hosts and their clients authenticate each other."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.contracts.files.own_files import open_own_file
from megatrain.peers.link import SECRET_BYTES


def read_secret(path: Path) -> bytes:
    """Return the secret in a file of this user that no other user can read.

    Raises: DataError naming the file and the rule.
    """
    make = f"make one: `(umask 077; head -c {SECRET_BYTES} /dev/urandom > {path})`"
    try:
        with open(open_own_file(path, os.O_RDONLY), "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(SECRET_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: the secret cannot be read: {error.strerror}; {make}") from error
    if mode & 0o077:
        raise DataError(f"{path}: has mode {mode:04o}: others may read the secret; {make}")
    if len(secret) != SECRET_BYTES:
        raise DataError(f"{path}: a secret has {SECRET_BYTES} bytes, not another number; {make}")
    return secret

"""Secrets of receivers: read again for each message from files of the job's user, so that a new one needs no
restart.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.own_files import open_own_file

_MAX_BYTES = 4096


def read_secret(path: str, key: str) -> str:
    """Return the one line of a file that only its user can read. `key`: the option that names the file, for errors.

    Raises: ConfigError, which never contains the file's content.
    """
    try:
        with open(open_own_file(Path(path), os.O_RDONLY), "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{key}: {path} cannot be used: {error.strerror}; name a file of your own"]) from error
    if mode & 0o077:
        raise ConfigError(
            [f"{key}: {path} has mode {mode:o}, and others may have read it; set it to 600 and renew the secret in it"]
        )
    try:
        text = raw.decode("ascii").strip() if len(raw) <= _MAX_BYTES else ""
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable() or " " in text:
        raise ConfigError([f"{key}: {path} holds no secret: expected one line of ASCII without spaces"])
    return text

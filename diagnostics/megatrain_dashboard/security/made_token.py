"""The operator token of a page with actions but no configured token: made once per run, in a file that only its owner
can read.

Every user with an account on the machine can use loopback, so reaching the page proves nothing. A caller that
can read a file of the job's user has that user's rights.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.own_files import open_own_file
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.settings import DashboardSettings

TOKEN_NAME = "operator-token"
_TOKEN_BYTES = 32
_MAX_BYTES = 4096


def with_token(settings: DashboardSettings, run: RunDirectory) -> tuple[DashboardSettings, Path | None]:
    """Return settings that identify operators, and the file of the token where one was made for that.

    Raises: ConfigError when the file cannot be made or used.
    """
    if not settings.enable_actions or not settings.is_open:
        return settings, None
    path = run.diagnosis / TOKEN_NAME
    try:
        return replace(settings, operator_token=_made_token(path)), path
    except OSError as error:
        problem = f"dashboard.enable_actions=true needs a token, and {path} cannot be used: {error.strerror}"
        hint = "remove it, or name a file of your own with dashboard.operator_token_file"
        raise ConfigError([f"{problem}; {hint}"]) from error


def _made_token(path: Path) -> str:
    """Return the token in a file that only this user can read; make the file if there is none. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(made, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(_TOKEN_BYTES)}\n")
    with open(open_own_file(path, os.O_RDONLY), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        token = file.read(_MAX_BYTES).decode("ascii", errors="replace").strip()
    if mode & 0o077:
        raise OSError(errno.EPERM, f"it has mode {mode:04o}, and others may have read it", str(path))
    if len(token) != 2 * _TOKEN_BYTES or not token.isalnum():
        raise OSError(errno.EINVAL, "it does not contain a token", str(path))
    return token

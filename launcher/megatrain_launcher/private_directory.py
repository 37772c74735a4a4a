"""The directory in which a launch keeps its secrets: only its user can open it, and no other user made it before."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.own_files import NotOwnError, check_own_directory, make_own_directory


def make_private(directory: Path) -> None:
    """Make a directory of mode 0700, unless one exists in which no other user could have written.

    Raises: ConfigError saying what is wrong with it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        make_own_directory(directory)
        check_own_directory(directory)
    except NotOwnError as error:
        problem = f"{error.filename} {error.strerror}, and the password of the job's etcd is stored there"
        raise ConfigError(
            [f"{problem}; remove it if you do not know who wrote in it, or set job.run_directory"]
        ) from error
    except OSError as error:
        raise ConfigError([f"{directory} cannot be written: {error.strerror}; set job.run_directory"]) from error

"""The directories of a job's etcd: a private one for its data and secrets, which belongs to one launch only, and one
for its sockets.
"""

from __future__ import annotations

import errno
import io
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files import file_locks
from megatrain.contracts.files.own_files import NotOwnError, check_own_directory, make_own_directory, open_own_file
from megatrain_job.coordination.settings import fits_socket
from megatrain_launcher.etcd.program import CLIENT_SOCKET

LOCK = "lock"


def make_private(directory: Path) -> None:
    """Create a directory of mode 0700, or accept an existing one in which no other user could have written.

    Raises: ConfigError with the reason why it cannot be used.
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


@contextmanager
def place_of_sockets(directory: Path) -> Iterator[Path]:
    """Yield a directory for this process's sockets: `directory` if it can hold sockets, else a temporary one."""
    if _can_hold_socket(directory):
        yield directory
        return
    with TemporaryDirectory(prefix="megatrain-") as made:
        yield Path(made)


def _can_hold_socket(directory: Path) -> bool:
    """Return whether the path is short enough, and the file system supports sockets."""
    if not fits_socket(str(directory / CLIENT_SOCKET)):
        return False
    path = directory / "probe"
    try:
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError:
        return False
    return True


def take_lock(directory: Path) -> io.FileIO:
    """Lock the directory for as long as the returned file is open. Raises: ConfigError naming the holder."""
    make_private(directory)
    try:
        data = directory / "etcd"
        if data.exists():
            check_own_directory(data)
        handle = open_own_file(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise ConfigError([why_not_started(directory, error)]) from error
    file = io.FileIO(handle, "a+")
    try:
        problem = file_locks.lock(handle)
    except BlockingIOError as error:
        holder = (directory / LOCK).read_text(errors="replace").strip() or "another process"
        file.close()
        raise ConfigError(
            [f"{directory}: {holder} has launched a job there that still runs; stop it, or set job.run_directory"]
        ) from error
    except OSError as error:
        file.close()
        raise ConfigError([why_not_started(directory, error)]) from error
    if problem:
        # etcd locks its own files too, and would exit with an error of its database
        file.close()
        needed = f"{directory / LOCK} cannot be locked ({problem}): the file system has no file locks"
        advice = "set job.run_directory to a directory on a file system with locks, or name an etcd (--rdzv-endpoint)"
        raise ConfigError([f"{needed}, and the job's etcd needs them; {advice}"])
    with suppress(OSError):  # the holder's name is for messages, and the disk may be full
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file


def why_not_started(directory: Path, error: OSError) -> str:
    """Return why no etcd can be started in a directory, and what to do."""
    if error.errno == errno.EADDRNOTAVAIL:
        return "etcd cannot listen at an address of another machine: give --local-addr an address of this host"
    path_text = f"{error.filename}: " if error.filename else ""
    return (
        f"no etcd can be started in {directory}: {path_text}{error.strerror or error}; set job.run_directory, or name "
        "an etcd with --rdzv-endpoint=HOST:PORT"
    )

"""The files of a launch in <run>/coordination: how to reach the job's own etcd, and how the job ended.

endpoint, password, certificate.pem, key.pem    see megatrain_job.jobs.own_etcd
exit-code   how the last launch ended: for batch scripts, and for `status` when the job's etcd is gone
etcd/       etcd's data; etcd.log and etcd's unix sockets are beside it
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError, CoordinationError, DataError, MegatrainError
from megatrain.contracts.files.whole_files import write_private
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles
from megatrain_job.jobs.own_etcd import (
    COORDINATION_DIRECTORY,
    ENDPOINT_FILE,
    PASSWORD_BYTES,
    PASSWORD_FILE,
    USER,
    endpoint_text,
    own_tls,
    read_own_etcd,
    read_password,
)
from megatrain_job.jobs.run_state import EXIT_CODE_FILE
from megatrain_launcher.etcd.place import make_private
from megatrain_launcher.etcd.process import EtcdProcess

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files of one run."""

    run: Path

    @classmethod
    def of(cls, config: Config) -> JobFiles:
        return cls(Path(config.job.resolved_run_directory).absolute())

    @property
    def directory(self) -> Path:
        return self.run / COORDINATION_DIRECTORY

    @property
    def endpoint(self) -> Path:
        return self.run / ENDPOINT_FILE

    @property
    def password(self) -> Path:
        return self.run / PASSWORD_FILE

    @property
    def tls(self) -> TlsFiles:
        return own_tls(self.run)

    @property
    def exit_code(self) -> Path:
        return self.run / EXIT_CODE_FILE

    def credentials(self) -> Credentials:
        """Return user and password of the job's own etcd; the first call creates the password. Raises: ConfigError."""
        make_private(self.directory)
        try:
            with suppress(FileExistsError):
                write_private(self.password, secrets.token_urlsafe(PASSWORD_BYTES).encode(), is_new=True)
            return Credentials(USER, read_password(self.run), self.password)
        except OSError as error:
            raise ConfigError([f"{error.filename}: {error.strerror}; set job.run_directory"]) from error
        except DataError as error:
            raise ConfigError([f"{error}; remove {self.directory}, or set job.run_directory"]) from error

    @contextmanager
    def published(self, etcd: EtcdProcess, job: str, launch_id: str) -> Iterator[None]:
        """Publish etcd's address in a file during the block. Raises: ConfigError when the file cannot be written."""
        try:
            etcd.files.keep(self.endpoint, endpoint_text(etcd.settings, job, launch_id).encode())
        except OSError as error:
            raise ConfigError([f"{self.endpoint}: {error.strerror}; set job.run_directory"]) from error
        try:
            yield
        finally:
            etcd.files.drop(self.endpoint)

    def wait_for_endpoint(self, launch_id: str, timeout_s: float) -> EtcdSettings:
        """Return the settings of the etcd that another host of this launch starts.

        Raises: CoordinationError when it does not appear.
        """
        deadline = time.monotonic() + timeout_s
        found = "no such file"
        while time.monotonic() < deadline:
            try:
                own_etcd = read_own_etcd(self.run)
                if own_etcd.launch_id == launch_id:
                    return own_etcd.settings
                found = f"it is of launch {own_etcd.launch_id}"
            except FileNotFoundError:
                found = "no such file"
            except OSError as error:
                found = f"{error.filename} {error.strerror}"
            except (DataError, ConfigError) as error:
                found = str(error)
            time.sleep(_POLL_S)
        raise CoordinationError(
            f"{self.endpoint}: the first host did not publish etcd's address ({found}; this is launch {launch_id}); "
            "the run directory must be the same on all hosts, or name an etcd with --rdzv-endpoint=HOST:PORT"
        )

    @contextmanager
    def recorded_end(self) -> Iterator[Callable[[int], int]]:
        """Yield a function with which the block records the launch's exit code.

        The exit code of a MegatrainError is recorded too. The record of the earlier launch is removed first: a killed
        launch leaves none.
        """
        with suppress(OSError):
            self.exit_code.unlink(missing_ok=True)

        def record(code: int) -> int:
            self.write_exit_code(code)
            return code

        try:
            yield record
        except MegatrainError as error:
            self.write_exit_code(error.exit_code)
            raise

    def write_exit_code(self, exit_code: int) -> None:
        """Write the job's exit code; a full disk must not change how this process ends."""
        with suppress(OSError, ConfigError):
            make_private(self.directory)
            write_private(self.exit_code, f"{exit_code}\n".encode())


def why_not_written(directory: Path) -> str:
    """Create a directory and a file in it; return why that failed, empty if it did not."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"

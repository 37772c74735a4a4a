"""What a launch leaves in <run>/coordination: where the job's own etcd is, its password, and how the job ended.

endpoint    JSON: endpoints, job, launch_id; user and password_file where etcd asks for them. While the etcd runs.
password    of an etcd that other hosts reach; made once
exit-code   written by hosts that left in good order, for a batch script
etcd/       etcd's data, etcd.log beside it
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.whole_files import temporary_name
from megatrain.coordination.settings import Credentials, EtcdSettings

USER = "megatrain"
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
        return self.run / "coordination"

    @property
    def endpoint(self) -> Path:
        return self.directory / "endpoint"

    @property
    def password(self) -> Path:
        return self.directory / "password"

    @property
    def exit_code(self) -> Path:
        return self.directory / "exit-code"

    def credentials(self) -> Credentials:
        """Return user and password of the job's own etcd, made at the first call. Raises: ConfigError."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileExistsError):
                _write_whole(self.password, secrets.token_urlsafe(24), is_new=True)
            text = self.password.read_text().strip()
        except OSError as error:
            raise ConfigError([f"{self.password}: {error.strerror}; set job.run_directory"]) from error
        return Credentials(USER, text)

    @contextmanager
    def published(self, settings: EtcdSettings, job: str, launch_id: str) -> Iterator[None]:
        """Say where etcd is as long as the block runs. Raises: ConfigError when it cannot be written."""
        told = {"endpoints": [str(endpoint) for endpoint in settings.endpoints], "job": job, "launch_id": launch_id}
        if settings.credentials is not None:
            told |= {"user": settings.credentials.user, "password_file": str(self.password)}
        try:
            _write_whole(self.endpoint, json.dumps(told) + "\n")
        except OSError as error:
            raise ConfigError([f"{self.endpoint}: {error.strerror}; set job.run_directory"]) from error
        try:
            yield
        finally:
            self.endpoint.unlink(missing_ok=True)

    def wait_for_endpoint(self, launch_id: str, timeout_s: float) -> EtcdSettings:
        """Return how to reach the etcd that another host of this launch brings.

        Raises: CoordinationError when it does not come.
        """
        deadline = time.monotonic() + timeout_s
        found = "no such file"
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(self.endpoint.read_text())
                if told["launch_id"] == launch_id:
                    return EtcdSettings.of(told["endpoints"], credentials=self.credentials())
                found = f"it is of launch {told['launch_id']}"
            time.sleep(_POLL_S)
        raise CoordinationError(
            f"{self.endpoint}: the first host did not tell where etcd is ({found}, this is launch {launch_id}); the "
            "run directory must be the same on all hosts, or name an etcd by --rdzv-endpoint=HOST:PORT"
        )

    def tell_end(self, exit_code: int) -> None:
        """Leave the job's exit code for a batch script; a disk that is full must not change how we end."""
        with suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_whole(self.exit_code, f"{exit_code}\n")


def why_not_written(directory: Path) -> str:
    """Make a directory and try it; return why nothing can be written there, empty where it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def _write_whole(path: Path, text: str, *, is_new: bool = False) -> None:
    """Put a file in place that only we can read. Raises: OSError; FileExistsError where it shall be new."""
    temporary = path.with_name(temporary_name(path.name))
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(text)
        if is_new:
            os.link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

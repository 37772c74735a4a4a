"""A file in object storage: its version, and reads that are repeated while the storage fails, and notice a change.

A read asks for the version afterwards: if it is that of the time when the file was opened, so are the bytes.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from megatrain.contracts.errors import DataError
from megatrain.contracts.files.url_drivers import reason
from megatrain.contracts.files.whole_files import MISSING_ERRORS
from megatrain.data.input_file import FileVersion, url_version
from megatrain.data.token_file import UnreadableError

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""The longest pauses before a read is repeated. After these, the storage counts as failed."""
_FINAL = (DataError, PermissionError, IsADirectoryError, *MISSING_ERRORS)
_Result = TypeVar("_Result")


class RemoteFile:
    """A file behind a URL: `path` in fsspec's driver `store`. `version`: that of the time when it was opened.

    Raises: FileNotFoundError; DataError when the file cannot be looked up.
    """

    def __init__(self, url: str, store: Any, path: str) -> None:
        self.url = url
        self._store = store
        self._path = path
        self.version = self._look_up()

    @property
    def key(self) -> str:
        """Identifies the content."""
        return f"{self.url}\n{self.version.num_bytes}\n{self.version.mark}"

    def _look_up(self) -> FileVersion:
        try:
            return self._repeated(lambda: url_version(self._store, self._path))
        except MISSING_ERRORS as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url) from error
        except Exception as error:
            raise DataError(f"{self.url}: cannot be read: {reason(error)}; check URL and credentials") from error

    def read_range(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the version that was opened.

        Raises: DataError when the file was changed or removed, or access is denied; UnreadableError when the storage
        fails for good.
        """
        try:
            return self._repeated(lambda: self._read(offset, num_bytes))
        except DataError:
            raise
        except _FINAL as error:
            raise DataError(
                f"{self.url} at byte {offset}: cannot be read: {reason(error)}; check the credentials"
            ) from error
        except Exception as error:
            text = (
                f"cannot be read, after {len(PAUSES_S) + 1} tries: {reason(error)}; check the network and the storage"
            )
            raise UnreadableError(offset, text) from error

    def _read(self, offset: int, num_bytes: int) -> bytes:
        try:
            content = bytes(self._store.cat_file(self._path, start=offset, end=offset + num_bytes))
        finally:
            # after an error, too: drivers report a range beyond a new end with various ones
            self._check_version()
        if len(content) != num_bytes:
            raise OSError(errno.EIO, f"{len(content)} of {num_bytes} bytes were received")
        return content

    def _check_version(self) -> None:
        try:
            found = url_version(self._store, self._path)
        except MISSING_ERRORS as error:
            raise DataError(f"{self.url}: was removed while it was read; restore it") from error
        if found != self.version:
            before, now = (f"{version.num_bytes} bytes ({version.mark})" for version in (self.version, found))
            raise DataError(
                f"{self.url}: was changed while it was read: had {before}, has {now}; restore it, or start again"
            )

    def _repeated(self, action: Callable[[], _Result]) -> _Result:
        for pause_s in PAUSES_S:
            try:
                return action()
            except Exception as error:
                # of the SDKs only the names are known here: NoCredentialsError, CredentialRetrievalError
                if isinstance(error, _FINAL) or "Credential" in type(error).__name__:
                    raise
            # the hosts of a job fail together, and must not come back together
            time.sleep(pause_s * random.uniform(0.5, 1.0))
        return action()

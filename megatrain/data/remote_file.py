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

from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.contracts.files.url_drivers import reason
from megatrain.contracts.files.whole_files import MISSING_ERRORS
from megatrain.data.input_file import FileVersion, url_version

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""The longest pauses before a read is repeated. After these, the storage counts as failed."""
_REFUSALS = (PermissionError, IsADirectoryError, *MISSING_ERRORS)
_Result = TypeVar("_Result")


class RemoteFile:
    """A file behind a URL: `path` in fsspec's driver `store`. `version`: that of the time when it was opened.

    Raises: FileNotFoundError; DataError when access is denied; UnreachableError when the storage does not answer.
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
        found = self._repeated(self.url, self._current_version)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        return found

    def _current_version(self) -> FileVersion | None:
        """Return the version that the storage has now; None if the file does not exist."""
        try:
            return url_version(self._store, self._path)
        except MISSING_ERRORS:
            return None

    def read_range(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the version that was opened.

        Raises: DataError when the file was changed or removed, or access is denied; UnreachableError when the storage
        does not answer.
        """
        if num_bytes == 0:
            return b""
        return self._repeated(f"{self.url} at byte {offset}", lambda: self._read(offset, num_bytes))

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
        found = self._current_version()
        if found is None:
            raise DataError(f"{self.url}: was removed while it was read; restore it")
        if found != self.version:
            before, now = (f"{version.num_bytes} bytes ({version.mark})" for version in (self.version, found))
            raise DataError(
                f"{self.url}: was changed while it was read: had {before}, has {now}; restore it, or start again"
            )

    def _repeated(self, what: str, action: Callable[[], _Result]) -> _Result:
        """Return the result of an action, which is repeated while the storage fails.

        Raises: DataError naming `what` when access is denied; UnreachableError naming it after the last try.
        """
        num_failed = 0
        while True:
            try:
                return action()
            except DataError:
                raise
            except Exception as error:
                # of the SDKs only the names are known here: NoCredentialsError, CredentialRetrievalError
                if isinstance(error, _REFUSALS) or "Credential" in type(error).__name__:
                    raise DataError(f"{what}: cannot be read: {reason(error)}; {_refusal_hint(error)}") from error
                if num_failed == len(PAUSES_S):
                    raise UnreachableError(
                        f"{what}: cannot be read, after {num_failed + 1} tries: {reason(error)}; check the network and "
                        "the storage"
                    ) from error
            # requests of all hosts fail at the same time; different pauses keep them from returning all at once
            time.sleep(PAUSES_S[num_failed] * random.uniform(0.5, 1.0))
            num_failed += 1


def _refusal_hint(error: Exception) -> str:
    hint = "check URL and credentials"
    if isinstance(error, PermissionError):
        # S3 does not reveal to them whether an object exists
        return f"{hint}; without the permission to list (s3:ListBucket), a missing object is answered like this, too"
    return hint

"""The first start of a run: its remote data are looked up once, so that a wrong endpoint is not taken for an outage.

A run that has read its data waits for storage that does not answer, and is restarted. Before the first read, it is
unknown whether the endpoint, the bucket and the credentials are right. So until a run has begun, the first rank looks
up each URL once, and an error ends the job without a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from megatrain.config.config import Config
from megatrain.config.serialize import recorded_values
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.url_drivers import endpoint, reason
from megatrain.data.indexed import index_path
from megatrain.data.remote_path import RemotePath
from megatrain.data.side_by_side import MOST_THREADS
from megatrain.formatting import names_text
from megatrain.training.training_data import data_prefixes

TIMEOUT_S = 20.0
"""The time limit of all look-ups together. Drivers repeat failed requests within this time."""


def has_begun(run_directory: Path) -> bool:
    """Return whether a round of the run has begun to train: whether a configuration is recorded that can be read."""
    return recorded_values(run_directory) is not None


def check_storage_of_first_start(config: Config, run_directory: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Look up the token files behind URLs, unless a round of this run has begun to train.

    Raises: DataError with the keys, a URL, its endpoint and the error of those that cannot be read.
    """
    if has_begun(run_directory):
        return
    remote = {key: prefix for key, prefix in data_prefixes(config).items() if isinstance(prefix, RemotePath)}
    problems = _problems({key: index_path(prefix) for key, prefix in remote.items()}, timeout_s)
    if not problems:
        return
    key, problem = next(iter(problems.items()))
    address = endpoint(remote[key].store)
    place = f" at {address}" if address else ""
    others = f" (nor can {names_text(list(problems)[1:])})" if len(problems) > 1 else ""
    raise DataError(
        f"{key}={str(remote[key])!r}: cannot be read{place}: {problem}{others}; check the URL, the "
        "endpoint and the credentials. The run has not begun, so it ends and does not wait for the storage"
    )


def _problems(paths: Mapping[str, RemotePath], timeout_s: float) -> dict[str, str]:
    """Look up each file once, all at the same time; return the reasons of those that cannot be read, by key."""
    found = dict.fromkeys(paths, f"no answer within {timeout_s:g} s")
    waiting = list(paths.items())

    def look_up() -> None:
        while waiting:
            try:
                key, path = waiting.pop(0)
            except IndexError:  # another thread was faster
                return
            try:
                path.look_up()
            except Exception as error:  # noqa: BLE001 -- SDKs of storage raise errors of their own kinds
                found[key] = reason(error)
            else:
                found[key] = ""

    # daemon threads: one that waits for the storage must not keep an ending process alive
    threads = [threading.Thread(target=look_up, daemon=True) for _ in range(min(len(paths), MOST_THREADS))]
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {key: problem for key, problem in found.items() if problem}

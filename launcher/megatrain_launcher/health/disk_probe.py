"""A program that reports the space of a directory's disk, and writes, syncs and removes a small file there.

It is a separate program because a file system without its server may block callers in the kernel forever.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.files.whole_files import temporary_name
from megatrain_launcher.health.child import guard_probe

_PROBE_BYTES = 1 << 16


def main(directory: Path) -> None:
    """Print a JSON object with free_bytes, total_bytes, free_files and write_s, or with error."""
    guard_probe()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        space = os.statvfs(directory)
        began = time.monotonic()
        _write(directory / temporary_name("health"))
        write_s = time.monotonic() - began
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error)}))
        return
    answer = {
        "free_bytes": space.f_bavail * space.f_frsize,
        "total_bytes": space.f_blocks * space.f_frsize,
        "free_files": space.f_favail if space.f_files else None,  # some file systems do not count files
        "write_s": write_s,
    }
    print(json.dumps(answer))


def _write(path: Path) -> None:
    try:
        with path.open("xb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        with suppress(OSError):
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

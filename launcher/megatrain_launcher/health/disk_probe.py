"""Run as a program: says how much space a directory's disk has, and writes, syncs and removes a small file there.

A program of its own because a file system whose server is gone may keep its callers in the kernel for good.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from megatrain.contracts.whole_files import temporary_name
from megatrain_launcher.health.leash import end_with_starter

_PROBE_BYTES = 1 << 16


def main(directory: Path) -> None:
    """Print free_bytes, total_bytes, free_files and write_s, or error."""
    end_with_starter()
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

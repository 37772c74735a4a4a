"""The part of an executor that keeps a standby server, for tests that kill it: prints its processes, and waits."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from tests.helpers.standby_workers import programs, read_line

SOURCE = """
    import os, signal, subprocess
    inside = subprocess.Popen(["sleep", "600"])
    outside = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(os.getpid(), inside.pid, outside.pid)
    signal.pause()
"""


def main(directory: Path) -> None:
    """Start a worker with a child in its group and one outside, print the pids as JSON, and wait to be killed."""
    with programs(directory) as made:
        _, read_fd = made.start(SOURCE, PATH=os.environ["PATH"])
        worker, inside, outside = map(int, read_line(read_fd).split())
        print(json.dumps({"pids": [worker, inside, made.client.pid], "outside": outside}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

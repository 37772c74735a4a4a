"""A fork of the test's process, for irreversible operations such as an abrupt exit or giving up permissions."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_child(act: Callable[[], object]) -> int:
    """Call `act` in a child process and return its exit code: 1 if it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001 -- the exit code reports it to the test
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

"""Another user of this machine without any of our rights, for tests of what is denied to other users."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.helpers.child_process import in_child
from tests.helpers.require import require

OTHER_USER = 65_533
"""A user id without an account."""


def as_other_user(act: Callable[[], None]) -> None:
    """Call `act` in a child process of another user; fail if it raises. Only root can do this; otherwise the test is
    skipped."""
    require("root", os.geteuid() == 0, "only root can act as another user")

    def act_as_other_user() -> None:
        os.setgroups([])
        os.setresgid(OTHER_USER, OTHER_USER, OTHER_USER)
        os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
        act()

    assert in_child(act_as_other_user) == 0, "the other user could not act"


def readable_by_all(directory: Path) -> Path:
    """Let every user read a test's own directory, and return it."""
    for parent in (directory, *directory.parents):
        if parent.stat().st_mode & 0o055 == 0:
            parent.chmod(0o755)
    return directory


def everybodys_place(parent: Path) -> Path:
    """Return a directory below `parent`, a test's own, in which every user may create files, as in /dev/shm."""
    place = readable_by_all(parent) / "shm"
    place.mkdir()
    place.chmod(0o1777)
    return place

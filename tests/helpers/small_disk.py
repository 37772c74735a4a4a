"""A file system of a given size, which is visible to the processes started in it, and which a test can fill or extend.

It is a tmpfs in a separate mount namespace (and, if the tests do not run as root, in a separate user namespace):
nothing else on the machine sees it, and it ends with its last process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.require import require

_KEEPER = 'mount -t tmpfs -o size="$1",mode=755 tmpfs "$2" && echo ready && exec cat'
"""Keeps the namespaces until its input ends."""
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """`path`: the path for processes in it; `seen`: the path for the test."""

    path: Path
    keeper: int

    @property
    def seen(self) -> Path:
        return Path(f"/proc/{self.keeper}/root{self.path}")

    def enter(self, *arguments: str) -> list[str]:
        """Return the start of a command line that runs a program in it."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        # The command does not keep the working directory.
        return ["nsenter", f"--target={self.keeper}", "--mount", *user, "--",
                "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", os.getcwd(), *arguments]  # fmt: skip

    def join(self) -> None:
        """Let this process, which has one thread, see it. Its working directory is the root afterwards."""
        library = ctypes.CDLL(None, use_errno=True)
        kinds = {"mnt": _CLONE_NEWNS} if os.geteuid() == 0 else {"user": _CLONE_NEWUSER, "mnt": _CLONE_NEWNS}
        for kind, flag in kinds.items():
            with open(f"/proc/{self.keeper}/ns/{kind}") as namespace:
                if library.setns(namespace.fileno(), flag) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, f"setns: {os.strerror(number)}")

    def resize(self, num_bytes: int) -> None:
        self._remount(f"size={num_bytes}")

    def make_read_only(self) -> None:
        self._remount("ro")

    def _remount(self, option: str) -> None:
        # Given with all properties of the mount: those that the mount table shows in a user namespace are not accepted
        # there.
        arguments = ["mount", "-t", "tmpfs", "-o", f"remount,{option}", "tmpfs", str(self.path)]
        subprocess.run(self.enter(*arguments), check=True)

    def fill(self) -> None:
        """Fill it completely. Removing a file frees its space again."""
        with (self.seen / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free_space(self) -> None:
        """Undo `fill`."""
        (self.seen / "filler").unlink()


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Mount a small file system at `path` for the processes that enter it. Skips the test if that is not allowed."""
    programs = [name for name in ("unshare", "nsenter", "mount") if shutil.which(name) is None]
    require("mount", found=not programs, reason=f"{', '.join(programs)}: not installed")
    path.mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    keeper = subprocess.Popen(
        ["unshare", "--mount", *user, "sh", "-c", _KEEPER, "sh", str(num_bytes), str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        is_ready = keeper.stdout.readline() == "ready\n"
        require("mount", found=is_ready, reason="" if is_ready else keeper.stderr.read().strip())
        yield SmallDisk(path, keeper.pid)
    finally:
        keeper.communicate()

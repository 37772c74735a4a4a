"""A location that calls a function before or after each operation: to record it, to fail, or to interfere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatrain.checkpoint_format.location import Location, Sink

Hook = Callable[[str, str], None]
"""Called with the operation and its path below the outermost location. Operations: read, list, stat, write, create,
append, close, remove."""
READS = frozenset({"read", "list", "stat"})
"""The operations that change nothing."""


def _nothing(action: str, path: str) -> None:
    pass


@dataclass(frozen=True)
class HookedLocation:
    """after: called after each change: write, close or remove."""

    inner: Location
    hook: Hook = _nothing
    path: str = ""
    after: Hook = _nothing

    @property
    def name(self) -> str:
        return self.inner.name

    def __str__(self) -> str:
        return str(self.inner)

    def __truediv__(self, name: str) -> HookedLocation:
        return HookedLocation(self.inner / name, self.hook, f"{self.path}/{name}" if self.path else name, self.after)

    def entries(self) -> list[Location]:
        self.hook("list", self.path)
        return [self / entry.name for entry in self.inner.entries()]

    def exists(self) -> bool:
        self.hook("stat", self.path)
        return self.inner.exists()

    def size(self) -> int | None:
        self.hook("stat", self.path)
        return self.inner.size()

    def read(self) -> bytes:
        self.hook("read", self.path)
        return self.inner.read()

    def read_range(self, offset: int, num_bytes: int) -> bytearray:
        self.hook("read", self.path)
        return self.inner.read_range(offset, num_bytes)

    def write(self, content: bytes) -> None:
        self.hook("write", self.path)
        self.inner.write(content)
        self.after("write", self.path)

    def write_new(self, content: bytes) -> bool:
        self.hook("write", self.path)
        is_new = self.inner.write_new(content)
        self.after("write", self.path)
        return is_new

    def is_exclusive(self) -> bool:
        return self.inner.is_exclusive()

    def create(self) -> Sink:
        self.hook("create", self.path)
        return _HookedSink(self.inner.create(), self.hook, self.path, self.after)

    def remove(self) -> None:
        self.hook("remove", self.path)
        self.inner.remove()
        self.after("remove", self.path)


@dataclass(frozen=True)
class _HookedSink:
    inner: Sink
    hook: Hook
    path: str
    after: Hook

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        self.hook("append", self.path)
        self.inner.write(buffer)

    def close(self) -> None:
        self.hook("close", self.path)
        self.inner.close()
        self.after("close", self.path)

    def abort(self) -> None:
        self.inner.abort()

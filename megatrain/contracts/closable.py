"""A class whose objects close themselves at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closable(ABC):
    """An object that holds resources until `close`, which the end of a `with` block calls."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> object:
        """Release the resources. A class may return something about the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

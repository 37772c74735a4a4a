"""Count the bytes of all live tensors, and their peak, while code runs: a dispatch mode that works on any device.

On real tensors it is the referee of plans; on meta tensors it makes them, as what these would take.
The idea: every operation passes the mode, also those of backward passes and of custom autograd functions; the storage
of each result is counted once, however many views share it, until a weak reference says that it died. What a kernel
allocates and frees inside itself is not seen, and neither is what an allocator rounds up or caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakTensorBytes(TorchDispatchMode):
    """Bytes of the live tensors made inside the context, or named by `include`: now, and at most since `reset_peak`."""

    def __init__(self, *, on_meta: bool = False) -> None:
        """on_meta: count tensors on the meta device and no others; else those are the ones that cost nothing."""
        super().__init__()
        self._on_meta = on_meta
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def include(self, *owners: nn.Module | Tensor | Iterable[Tensor]) -> Self:
        """Also count what exists already: tensors, or parameters and buffers of modules with their gradients."""
        for owner in owners:
            if isinstance(owner, nn.Module):
                for x in (*owner.parameters(), *owner.buffers()):
                    self._count(x)
                    self._count(x.grad)
            else:
                for x in [owner] if isinstance(owner, Tensor) else owner:
                    self._count(x)
        return self

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak_bytes = self.live_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        # later deaths are nobody's business, and the numbers stay as they were
        self._references.clear()
        self._sizes.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._count(leaf)
        return result

    def _count(self, x: object) -> None:
        if not isinstance(x, Tensor) or x.is_meta != self._on_meta:
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._references:
            # the Python object lives as long as the C++ storage: torch hands ownership over when Python lets it go
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.live_bytes += size - self._sizes.get(key, 0)  # a resized storage counts with its new size
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        del self._references[key]
        self.live_bytes -= self._sizes.pop(key)

"""Counts the bytes of all live tensors, and their peak, while code runs: a dispatch mode that works on any device.

With real tensors it checks plans; with meta tensors it makes plans, because it counts the bytes that real tensors would
take. Every operation passes through the mode, including those of backward passes and of custom autograd functions. The
storage of each result is counted once, for any number of views, until a weak reference reports its end. Not counted:
what a kernel allocates and frees internally, and what an allocator rounds up or caches.
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

from megatrain.planning.meta_results import MetaResults


class PeakTensorBytes(TorchDispatchMode):
    """Bytes of the live tensors that were made inside the context or given to `include`: now, and the peak since
    `reset_peak`."""

    def __init__(self, *, on_meta: bool = False) -> None:
        """on_meta: count only tensors on the meta device; otherwise count all tensors except those."""
        super().__init__()
        self._on_meta = on_meta
        self._results = MetaResults()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def include(self, *owners: nn.Module | Tensor | Iterable[Tensor]) -> Self:
        """Also count existing tensors: the given ones, or a module's parameters, buffers and their gradients."""
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
        """Start a new peak from the bytes that are live now."""
        self.peak_bytes = self.live_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        # tensors that die later are not tracked, so the numbers stay as they are
        self._references.clear()
        self._sizes.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing here is compiled; a mode that has to be skipped costs the import of all of torch._dynamo, about 2 s
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on_meta:
            result = self._results.call(func, args, kwargs or {})
        else:
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
            # the Python object lives as long as the C++ storage: torch keeps it when Python drops its last reference
            self._references[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.live_bytes += size - self._sizes.get(key, 0)  # a resized storage counts with its new size
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _drop(self, key: int) -> None:
        del self._references[key]
        self.live_bytes -= self._sizes.pop(key)

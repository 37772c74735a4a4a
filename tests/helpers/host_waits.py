"""Finds where a host waits for its device, without a device: the tensors of the device are on meta.

Work on meta costs nothing, and its results cannot be read, as on a GPU that has not finished. So each operation that
would wait on a GPU is detected: one that reads a result, one that copies from memory which is not pinned, and one that
takes a tensor of the host, which torch would copy first. Source: torch.cuda.set_sync_debug_mode finds the same on a
GPU, where tests/gpu/test_gpu_host_waits.py uses it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
PACKAGE = Path(__file__).parents[2] / "megatrain"


class HostWaits(TorchDispatchMode):
    """Records each wait of the host in `places`: the line of megatrain that waits, and the operation.

    A value that is read is 1, so that the code after the wait continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._pinned: list[torch.UntypedStorage] = []
        self._patch = pytest.MonkeyPatch()
        self._calls = _PythonCalls(self.note)

    def __enter__(self) -> HostWaits:
        self._patch.setattr(Tensor, "pin_memory", lambda x: self._pin(x))
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)
        self._patch.undo()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see PeakTensorBytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [x for x in tensors if x.is_meta]
        of_host = [x for x in tensors if not x.is_meta]
        if name == "_local_scalar_dense" and on_device:
            self.note(name)
            return True if args[0].dtype == torch.bool else 1
        if name == "_to_copy" and on_device and torch.device(kwargs.get("device", META)) != META:
            self.note(name)
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "_to_copy" and of_host and torch.device(kwargs.get("device", "cpu")) == META:
            if not (kwargs.get("non_blocking") and self._is_pinned(of_host[0])):
                self.note(name)
        elif name == "copy_" and on_device and of_host:
            if args[0] is of_host[0]:
                self.note(name)
                return args[0].fill_(1)
            if not (self._is_pinned(of_host[0]) and kwargs.get("non_blocking", len(args) > 2 and args[2])):
                self.note(name)
        elif on_device and any(x.dim() for x in of_host):
            self.note(name)
        return function(*args, **kwargs)

    def _pin(self, x: Tensor) -> Tensor:
        pinned = x.clone()
        self._pinned.append(pinned.untyped_storage())
        return pinned

    def _is_pinned(self, x: Tensor) -> bool:
        return any(x.untyped_storage()._cdata == storage._cdata for storage in self._pinned)

    def note(self, operation: str) -> None:
        """Record that this operation waits, and which line of megatrain called it."""
        frames = [one for one in traceback.extract_stack() if Path(one.filename).is_relative_to(PACKAGE)]
        where = f"{Path(frames[-1].filename).relative_to(PACKAGE.parent)}: {frames[-1].line}" if frames else "test"
        self.places.append(f"{where} ({operation})")


class _PythonCalls(TorchFunctionMode):
    """Detects operations that torch does not dispatch on meta: a new tensor with values of the host, and indices in a
    list."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == META:
            self._note(name)
        elif function in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, list) for one in index):
                self._note(name)
        return function(*args, **kwargs)

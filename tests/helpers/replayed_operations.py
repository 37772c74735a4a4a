"""CUDA graphs without CUDA: torch's operations are recorded, and repeated later on the same memory.

Python runs once, while work is recorded, as with a CUDA graph: a replay does not repeat Python's decisions or notes.
Recording changes nothing: the earlier content of memory is restored, and results are set to NaN. So is the memory of
both recordings of a micro-batch after the replay of its backward, which is when the next recording may use it.
Operations that would wait for a GPU are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = frozenset({"_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "equal", "masked_select"})
"""Operations that read a result on the host, whose result's size depends on values, or that copy from the host."""


@dataclass(frozen=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def is_idle(self) -> bool:
        """Return whether a replay has nothing to do: the result is only memory, or a view."""
        returns = self.function._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        return is_view or "empty" in self.function._schema.name

    def written(self) -> list[Tensor]:
        """Return the arguments that the function writes to."""
        found = []
        for position, argument in enumerate(self.function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[position] if position < len(self.args) else self.kwargs.get(argument.name)
                found += list(_tensors(value))
        return found

    def repeat(self) -> None:
        if self.is_idle:
            return
        result = self.function(*self.args, **self.kwargs)
        if not self.written():
            for old, new in zip(_tensors(self.result), _tensors(result), strict=True):
                old.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._given: dict[int, tuple[Any, Any]] = {}
        """By address, all storages that existed before; with their contents, if they were written to."""
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.partition("::")[2]
        if name in WAITING:
            raise RuntimeError(f"{name} waits for the device and cannot be captured")
        call = _Call(function, args, kwargs, None)
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made:
                self._given.setdefault(storage.data_ptr(), (storage, None))
        for tensor in call.written():
            storage = tensor.untyped_storage()
            if self._given.get(storage.data_ptr(), (None, storage))[1] is None:
                self._given[storage.data_ptr()] = (storage, storage.clone())
        result = function(*args, **kwargs)
        self.calls.append(_Call(function, args, kwargs, result))
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in self._given:
                self._made.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return result

    def undo(self) -> None:
        for storage, content in self._given.values():
            if content is not None:
                storage.copy_(content)
        self.corrupt()

    def corrupt(self) -> None:
        for tensor in self._made.values():
            # Not detach: autograd would detect that its saved tensors have changed, which it would not detect on a GPU.
            whole = tensor.data.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            if whole.dtype.is_floating_point and whole.element_size() > 1:
                whole.fill_(torch.nan)
            else:
                whole.view(torch.uint8).zero_()

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call.repeat()


class ReplayedOperations:
    """Replaces CudaGraphCapture. Recordings come in pairs: a forward, and its backward."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []
        """The number of replays of each recording."""
        self._recordings: list[_Recording] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        recording = _Recording()
        with recording:
            work()
        recording.undo()
        number = len(self._recordings)
        self._recordings.append(recording)
        self.num_replays.append(0)

        def replay() -> None:
            recording.replay()
            self.num_replays[number] += 1
            if number % 2 == 1:
                for one in self._recordings[number - 1 : number + 1]:
                    one.corrupt()

        return replay


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of `tree` that have memory."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes())

"""Carries out operations on the meta device, and computes equal ones only once.

A model has many equal layers, so most operations of a dry run repeat an earlier one with inputs of the same sizes, and
tensors on meta have no values. torch computes most results on meta in Python, which takes up to milliseconds for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

_Result = Callable[[Sequence[Any]], Any]
"""Makes a result from the arguments."""


class MetaResults:
    """Remembers the sizes of the results of operations, by the sizes of their inputs.

    Remembered are operations that return new tensors, and elementwise operations in place, which return their first
    argument. Views, other operations in place and operations that return anything but tensors are computed each time.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], _Result] = {}

    def call(self, operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation on meta tensors. It shares memory with the arguments as torch's does."""
        if not _is_known(operation):
            return operation(*args, **kwargs)
        key = operation, _described(args), _described(kwargs.items())
        found = self._found.get(key)
        if found is not None:
            return found(args)
        result = operation(*args, **kwargs)
        again = _how_to_make(operation, args, result)
        if again is not None:
            self._found[key] = again
        return result


@cache
def _is_known(operation: OpOverload) -> bool:
    """Return whether the sizes of the inputs determine all that an operation does on meta."""
    schema = operation._schema
    if schema.is_mutable:
        return torch.Tag.pointwise in operation.tags and operation._opname.endswith("_")
    return all(value.alias_info is None for value in schema.returns)


def _described(values: Any) -> tuple[object, ...]:
    return tuple(_description(value) for value in values)


def _description(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return _described(value)
    return type(value), value  # 1, 1.0 and True are equal, and their results have different dtypes


def _how_to_make(operation: OpOverload, args: Sequence[Any], result: Any) -> _Result | None:
    """Return how such a result is made again; None if that is not known."""
    if operation._schema.is_mutable:
        return _first if result is args[0] else None
    inputs = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
    if isinstance(result, Tensor):
        make = _maker(result, inputs)
        return None if make is None else lambda _: make()
    makers = [_maker(one, inputs) for one in result] if type(result) is tuple else []
    known = [one for one in makers if one is not None]
    if not known or len(known) < len(makers):
        return None
    return lambda _: tuple(one() for one in known)


def _first(args: Sequence[Any]) -> Any:
    return args[0]


def _maker(result: object, inputs: Collection[int]) -> Callable[[], Tensor] | None:
    """Return what makes a tensor like `result`. None unless it has memory of its own, and takes all of it: some
    operations return a view without declaring it. inputs: the storages of the arguments."""
    if not isinstance(result, Tensor) or not result.is_meta or result.storage_offset():
        return None
    shape, stride, dtype, storage = result.shape, result.stride(), result.dtype, result.untyped_storage()

    def make() -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    is_whole = make().untyped_storage().nbytes() == storage.nbytes()
    return make if is_whole and storage._cdata not in inputs else None

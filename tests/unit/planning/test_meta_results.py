"""Results on meta that are created again have the sizes, the memory and the aliases of those that torch computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.planning.meta_results import MetaResults

aten = torch.ops.aten
COMPUTED: list[tuple[int, ...]] = []
"""The sizes of the inputs for which `meta_results_test::count` was computed."""


@torch.library.custom_op("meta_results_test::count", mutates_args=())
def count(x: Tensor, factor: float) -> Tensor:
    return x * factor


@count.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    COMPUTED.append(tuple(x.shape))
    return torch.empty_like(x)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def turned(*shape: int) -> Tensor:
    return empty(*shape).transpose(0, 1)


OPERATIONS: dict[str, tuple[Any, Sequence[Sequence[Any]]]] = {
    # each with several arguments that must not be confused
    "broadcast": (aten.mul.Tensor, [(empty(3, 4), empty(4)), (empty(3, 1), empty(4)), (empty(4), empty(4))]),
    "strides": (aten.mul.Tensor, [(empty(3, 3), 2.0), (turned(3, 3), 2.0)]),
    "dtypes of numbers": (
        aten.mul.Tensor,
        [(empty(2, dtype=torch.int64), 1.0), (empty(2, dtype=torch.int64), 1), (empty(2, dtype=torch.bool), True)],
    ),
    "dtypes of tensors": (aten.add.Tensor, [(empty(2), empty(2)), (empty(2), empty(2, dtype=torch.float64))]),
    "lists": (aten.cat.default, [([empty(2), empty(3)],), ([empty(2), empty(3), empty(1)],)]),
    "several results": (aten.topk.default, [(empty(5, 7), 2), (empty(5, 7), 3)]),
    "in place": (aten.mul_.Tensor, [(empty(3, 4), 2.0), (empty(3, 4), empty(4))]),
    "resized in place": (aten.resize_.default, [(empty(3), [7]), (empty(3), [9])]),
    "view that is not declared": (aten._unsafe_view.default, [(empty(3, 4), [12]), (empty(3, 4), [4, 3])]),
    "view": (aten.view.default, [(empty(3, 4), [12]), (empty(3, 4), [4, 3])]),
}


def outline(value: Any, inputs: Sequence[Tensor]) -> Any:
    """Return sizes and bytes of a result, and which inputs share its memory."""
    if isinstance(value, tuple | list):
        return [outline(one, inputs) for one in value]
    memory = value.untyped_storage()
    shared = [number for number, one in enumerate(inputs) if one.untyped_storage()._cdata == memory._cdata]
    return value.shape, value.stride(), value.dtype, value.device.type, memory.nbytes(), shared


@pytest.mark.parametrize("case", OPERATIONS)
def test_results_are_those_of_torch_each_time(case: str) -> None:
    operation, several = OPERATIONS[case]
    results = MetaResults()
    for _ in range(3):
        for args in several:
            fresh = [x.clone() if isinstance(x, Tensor) and x.is_contiguous() else x for x in args]
            expected = [x.clone() if isinstance(x, Tensor) and x.is_contiguous() else x for x in args]
            tensors, others = ([x for x in values if isinstance(x, Tensor)] for values in (fresh, expected))
            found = outline(results.call(operation, fresh, {}), tensors)
            assert found == outline(operation(*expected), others)


def test_equal_operations_are_computed_once() -> None:
    results = MetaResults()
    COMPUTED.clear()
    operation = torch.ops.meta_results_test.count.default
    made = [results.call(operation, (empty(*shape), 2.0), {}) for shape in [(3,), (4,)] * 3]
    assert COMPUTED == [(3,), (4,)]
    assert [one.shape for one in made] == [(3,), (4,)] * 3
    assert len({one.untyped_storage()._cdata for one in made}) == len(made)

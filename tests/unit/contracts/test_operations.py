"""The table of operations is frozen: numbers are in files that must stay readable."""

from __future__ import annotations

from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation, operation_name

FROZEN = {
    "step": 1,
    "data-wait": 2,
    "forward-compute": 3,
    "backward-compute": 4,
    "forward-send": 5,
    "forward-recv": 6,
    "backward-send": 7,
    "backward-recv": 8,
    "params-all-gather": 9,
    "grads-reduce-scatter": 10,
    "tp-all-gather": 11,
    "tp-reduce-scatter": 12,
    "tp-all-reduce": 13,
    "dp-all-reduce": 14,
    "pp-all-reduce": 15,
    "embedding-all-reduce": 16,
    "clip": 17,
    "optimizer": 18,
    "gc": 19,
    "checkpoint": 20,
    "checkpoint-load": 21,
    "evaluation": 22,
    "init": 23,
    "barrier": 24,
    "checkpoint-exchange": 25,
    "backward-weight-compute": 26,
    "checksum": 27,
    "cp-all-reduce": 28,
    "updates-all-to-all": 29,
    "data-read": 30,
    "picture-wait": 31,
    "picture-requests": 32,
}
ON_HOST = {"barrier", "checkpoint-exchange", "checksum"}
COLLECTIVES = {name for name, number in FROZEN.items() if 9 <= number <= 16}
COLLECTIVES |= {"cp-all-reduce", "updates-all-to-all"} | ON_HOST
POINT_TO_POINT = {"forward-send", "forward-recv", "backward-send", "backward-recv"}
COMPUTES = {"forward-compute", "backward-compute", "backward-weight-compute", "clip", "optimizer"}
ON_DEVICE = (COLLECTIVES | POINT_TO_POINT | COMPUTES) - ON_HOST


def test_names_and_numbers_never_change() -> None:
    found = {operation.value: operation.number for operation in Operation}
    # New operations may be added to both tables; with a changed or removed number, old files would be misread.
    assert found == FROZEN
    assert max(found.values()) < MAX_OPERATIONS, "the span mask has a bit for each"


def test_kinds_of_operations() -> None:
    assert {operation.value for operation in Operation if operation.is_collective} == COLLECTIVES
    assert {operation.value for operation in Operation if operation.is_point_to_point} == POINT_TO_POINT
    assert {operation.value for operation in Operation if operation.is_on_device} == ON_DEVICE


def test_operation_is_found_by_name_and_named_by_number() -> None:
    assert Operation("forward-compute") is Operation.FORWARD_COMPUTE
    assert f"{Operation.GC}" == "gc"
    assert operation_name(19) == "gc"
    assert operation_name(57) == "operation-57"

"""The tables of events, one class each; columns are numpy arrays of equal length.

The key of a rank's row is (round, rank, sequence). The sequence number is the number of the record in the rank's black
box; equal keys are duplicates. Times are unix ns of the rank's host (one clock base per host); the table `clocks` has
each host's offset from the daemon's clock, and `clocks.align` converts times to it. Text columns are arrays of str.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.layout import SIZED_AXES

Int8 = NDArray[np.uint8]
Int16 = NDArray[np.int16]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Flags = NDArray[np.bool_]
Texts = NDArray[np.object_]
Selection = Flags | Int64

NO_DURATION = -1
"""In `duration_ns`: the span is open."""


def column(dtype: str, doc: str) -> Any:
    """Declare a column: a numpy dtype, or "text"."""
    return field(metadata={"dtype": dtype, "doc": doc})


def with_columns_of_axes(kind: type[Any]) -> type[Any]:
    """Add columns to a table: a rank's place on each axis, and the size of the axis."""
    for axis in SIZED_AXES:
        for name, doc in (
            (axis.rank_name, f"place among the {axis.about}"),
            (axis.size_name, f"number of {axis.about}"),
        ):
            kind.__annotations__[name] = Int32
            setattr(kind, name, column("i4", doc))
    return kind


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Single spans: for sampled steps, on demand, and around incidents."""

    NAME: ClassVar[str] = "spans"

    round: Int32 = column("i4", "round of the job")
    rank: Int32 = column("i4", "")
    sequence: Int64 = column("i8", "number of the record in the rank's black box")
    step: Int32 = column("i4", "-1: before the first step")
    operation: Int8 = column("u1", "number of the Operation; stored by name")
    microbatch: Int32 = column("i4", "number of the micro-batch; -1: none")
    chunk: Int16 = column("i2", "chunk of the stage; -1: none")
    group: Int16 = column("i2", "number of the group in this rank's table of groups; 0: none")
    collective: Int64 = column("i8", "number of the call within the group, from 1; 0: none")
    start_ns: Int64 = column("i8", "unix ns by the host's clock")
    duration_ns: Int64 = column("i8", "-1: the span has not ended")
    launch_ns: Int64 = column("i8", "when the host launched the operation, unix ns by the host's clock")
    num_bytes: Int64 = column("i8", "bytes that this rank sends or receives")
    flags: Int16 = column("i2", "RecordFlag")


@dataclass(frozen=True, slots=True, eq=False)
class StepTotals:
    """Sums by operation, for every step: at most 16 rows per rank and step."""

    NAME: ClassVar[str] = "totals"

    round: Int32 = column("i4", "round of the job")
    rank: Int32 = column("i4", "")
    sequence: Int64 = column("i8", "number of the record in the rank's black box")
    step: Int32 = column("i4", "")
    operation: Int8 = column("u1", "number of the Operation; stored by name")
    start_ns: Int64 = column("i8", "start of the step, unix ns by the host's clock")
    sum_ns: Int64 = column("i8", "sum of the durations")
    max_ns: Int64 = column("i8", "longest duration")
    count: Int32 = column("i4", "number of spans")
    num_bytes: Int64 = column("i8", "")


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Numbers reported per step: loss, gradient norm, tokens."""

    NAME: ClassVar[str] = "values"

    round: Int32 = column("i4", "round of the job")
    rank: Int32 = column("i4", "")
    sequence: Int64 = column("i8", "number of the record in the rank's black box")
    step: Int32 = column("i4", "")
    kind: Int8 = column("u1", "StepValue")
    at_ns: Int64 = column("i8", "unix ns by the host's clock")
    value: Float64 = column("f8", "infinity and NaN are stored as reported")


@dataclass(frozen=True, slots=True, eq=False)
@with_columns_of_axes
class Ranks:
    """The ranks: a row for each rank of each round, with columns for each axis of the mesh."""

    NAME: ClassVar[str] = "ranks"

    round: Int32 = column("i4", "round of the job")
    rank: Int32 = column("i4", "")
    pid: Int64 = column("i8", "")
    at_ns: Int64 = column("i8", "when the rank's black box was opened, unix ns by the host's clock")
    host: Texts = column("text", "name of the host in the job")
    branch: Texts = column("text", "branch of checkpoints")


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The process groups of each rank. Rows of two ranks with equal name and members are the same group."""

    NAME: ClassVar[str] = "groups"

    round: Int32 = column("i4", "round of the job")
    rank: Int32 = column("i4", "")
    group: Int16 = column("i2", "number of the group in this rank's table of groups")
    first_rank: Int32 = column("i4", "")
    stride: Int32 = column("i4", "0: members not known")
    num_ranks: Int32 = column("i4", "")
    name: Texts = column("text", "")


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """The offset of each host's clock from the daemon's (positive: ahead), measured as NTP does."""

    NAME: ClassVar[str] = "clocks"

    at_ns: Int64 = column("i8", "unix ns by the host's clock")
    offset_ns: Int64 = column("i8", "the host's clock minus the daemon's")
    error_ns: Int64 = column("i8", "error bound of the offset: half of the round trip")
    host: Texts = column("text", "")


@dataclass(frozen=True, slots=True, eq=False)
class LogLines:
    """Lines of the workers' output."""

    NAME: ClassVar[str] = "logs"

    round: Int32 = column("i4", "round of the job")
    rank: Int32 = column("i4", "")
    sequence: Int64 = column("i8", "offset of the line's end in the rank's log of that round, in bytes")
    at_ns: Int64 = column("i8", "when the line was read, unix ns by the host's clock")
    host: Texts = column("text", "")
    line: Texts = column("text", "without the end of line")


@dataclass(frozen=True, slots=True, eq=False)
class Stacks:
    """Python stacks of processes, dumped around a hang or on demand."""

    NAME: ClassVar[str] = "stacks"

    round: Int32 = column("i4", "round of the job")
    rank: Int32 = column("i4", "")
    sequence: Int64 = column("i8", "number of the dump on its host")
    at_ns: Int64 = column("i8", "unix ns by the host's clock")
    pid: Int64 = column("i8", "")
    host: Texts = column("text", "")
    thread: Texts = column("text", "name of the thread; the main one is MainThread")
    stack: Texts = column("text", "frames, outermost first, one per line: file:line function")


@dataclass(frozen=True, slots=True, eq=False)
class Gpus:
    """The GPUs of hosts: one row per GPU and reading. NaN: the driver does not report it, or this GPU lacks it."""

    NAME: ClassVar[str] = "gpus"

    round: Int32 = column("i4", "round of the job; -1: none yet")
    rank: Int32 = column("i4", "rank that computes on the GPU; -1: none of this round")
    step: Int32 = column("i4", "step of the GPU's rank, or else of the host; -1: none")
    at_ns: Int64 = column("i8", "unix ns by the host's clock")
    gpu: Int32 = column("i4", "the driver's number; -1: a row about all GPUs of the host")
    host: Texts = column("text", "")
    uuid: Texts = column("text", "")
    error: Texts = column("text", "why the GPU cannot be read; empty: it was read")
    recovery: Texts = column("text", "recovery that the driver asks for, such as a reset; empty: none")
    temperature_c: Float64 = column("f8", "")
    slowdown_temperature_c: Float64 = column("f8", "temperature at which the hardware slows the GPU down")
    memory_temperature_c: Float64 = column("f8", "")
    sm_clock_mhz: Float64 = column("f8", "")
    max_sm_clock_mhz: Float64 = column("f8", "")
    memory_clock_mhz: Float64 = column("f8", "")
    throttle_reasons: Float64 = column("f8", "bits of NVML's clocks event reasons")
    power_w: Float64 = column("f8", "")
    power_limit_w: Float64 = column("f8", "enforced limit")
    memory_used_bytes: Float64 = column("f8", "")
    memory_total_bytes: Float64 = column("f8", "")
    utilization: Float64 = column("f8", "fraction of the time in which a kernel ran, 0 to 1")
    corrected_errors: Float64 = column("f8", "memory errors since the driver was loaded")
    uncorrected_errors: Float64 = column("f8", "memory errors since the driver was loaded")
    lifetime_corrected_errors: Float64 = column("f8", "memory errors in the GPU's lifetime")
    lifetime_uncorrected_errors: Float64 = column("f8", "memory errors in the GPU's lifetime")
    retired_pages: Float64 = column("f8", "")
    corrected_rows: Float64 = column("f8", "rows remapped after corrected errors")
    uncorrected_rows: Float64 = column("f8", "rows remapped after uncorrected errors")
    is_reset_pending: Float64 = column("f8", "1: the next reset retires a bad page or row")
    has_remap_failed: Float64 = column("f8", "1: a bad memory row could not be remapped")
    nvlink_errors: Float64 = column("f8", "CRC errors, replays and recoveries of all links")
    pcie_replays: Float64 = column("f8", "")


@dataclass(frozen=True, slots=True, eq=False)
class NetworkLinks:
    """Network interfaces and RDMA ports of hosts: one row per interface or port and reading. NaN: not reported."""

    NAME: ClassVar[str] = "links"

    round: Int32 = column("i4", "round of the job; -1: none yet")
    step: Int32 = column("i4", "step of the host; -1: none")
    at_ns: Int64 = column("i8", "unix ns by the host's clock")
    host: Texts = column("text", "")
    link: Texts = column("text", "interface, or device:port")
    state: Texts = column("text", "state as the kernel names it")
    is_up: Float64 = column("f8", "1: the link is up")
    speed_mbps: Float64 = column("f8", "")
    downs: Float64 = column("f8", "changes of the carrier, or lost links")
    rx_errors: Float64 = column("f8", "")
    tx_errors: Float64 = column("f8", "")
    rx_dropped: Float64 = column("f8", "")
    tx_dropped: Float64 = column("f8", "")
    symbol_errors: Float64 = column("f8", "InfiniBand symbol errors, with recoveries of the link")
    retransmissions: Float64 = column("f8", "RDMA retransmissions")


@dataclass(frozen=True, slots=True, eq=False)
class Xids:
    """Errors that NVIDIA's driver reported, by their Xid numbers."""

    NAME: ClassVar[str] = "xids"

    round: Int32 = column("i4", "round of the job; -1: none yet")
    rank: Int32 = column("i4", "rank that computes on the GPU; -1: none of this round")
    step: Int32 = column("i4", "step of the GPU's rank, or else of the host; -1: none")
    at_ns: Int64 = column("i8", "unix ns by the host's clock")
    gpu: Int32 = column("i4", "the driver's number of the GPU; -1: not known")
    xid: Int32 = column("i4", "NVIDIA's Xid number")
    host: Texts = column("text", "")
    uuid: Texts = column("text", "UUID of the GPU")


TABLES = (Spans, StepTotals, Values, Ranks, Groups, Clocks, LogLines, Stacks, Gpus, NetworkLinks, Xids)
DEVICE_TABLES = (Gpus, NetworkLinks, Xids)
"""Tables about hosts, which may have no ranks: round, rank and step of a row may be -1."""
Table = Spans | StepTotals | Values | Ranks | Groups | Clocks | LogLines | Stacks | Gpus | NetworkLinks | Xids
TableType = TypeVar(
    "TableType", Spans, StepTotals, Values, Ranks, Groups, Clocks, LogLines, Stacks, Gpus, NetworkLinks, Xids
)


def columns_of(kind: type[Table]) -> dict[str, str]:
    """Return column -> numpy dtype or "text", in the order of the columns."""
    return {field_.name: field_.metadata["dtype"] for field_ in fields(kind)}


def num_rows(table: Table) -> int:
    return len(getattr(table, fields(table)[0].name))


def select(table: TableType, rows: Selection) -> TableType:
    """Return the rows at a mask or at indices."""
    return type(table)(*(getattr(table, field_.name)[rows] for field_ in fields(table)))


def joined(kind: type[TableType], parts: Sequence[TableType]) -> TableType:
    """Return the concatenated rows of all parts; an empty table if there are no parts."""
    if not parts:
        return from_columns(kind, {name: [] for name in columns_of(kind)})
    return kind(*(np.concatenate([getattr(part, field_.name) for part in parts]) for field_ in fields(kind)))


def from_columns(kind: type[TableType], columns: dict[str, Any]) -> TableType:
    """Return a table made from lists or arrays, converted to the columns' types.

    Raises: ValueError for missing or unknown columns, and for different lengths.
    """
    wanted = columns_of(kind)
    if set(columns) != set(wanted):
        raise ValueError(f"{kind.NAME}: columns {sorted(columns)}; expected {sorted(wanted)}")
    arrays = [np.asarray(columns[name], dtype=object if kind_ == "text" else kind_) for name, kind_ in wanted.items()]
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"{kind.NAME}: columns of different lengths {sorted({len(array) for array in arrays})}")
    return kind(*arrays)

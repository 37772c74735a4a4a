"""Reads JSON dumps of torch's Flight Recorder: positions of ranks in their groups, and disagreements about collectives.

Version 2.x of the format is supported (torch 2.5 to 2.13). On gloo the state of an entry is always "scheduled"; only
`retired` and the group's summary `pg_status` show which collectives are completed, so both are used. On NCCL a host
enqueues collectives far ahead of its GPU. If `pg_status` says which one has started on the GPU (with
TORCH_NCCL_ENABLE_TIMING), only started collectives count as entered. On NCCL `pg_config` has the members of groups. On
gloo `pg_config` has one entry without a name: the members of the default group, or none if the job has created
another group.
Members of other groups are the ranks whose dumps have the group. All ranks belong to the default group, so a rank
without a dump is a silent member. If ranks disagree about a group, the first sequence number with a difference is
reported: different operations, or different sizes for an operation that requires equal sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.hang import RankActivity
from megatrain_job.failures.hang import Position

_NONE_YET = -1
_MAX_RANKS = 1_000_000
_DEFAULT_GROUP = "default_pg"
"""torch's description of the group of all ranks."""
_NAME_OF_DEFAULT_GROUP = "0"
_EQUAL_SIZES = frozenset({
    "all_reduce", "all_reduce_barrier", "allreduce_coalesced", "broadcast", "reduce", "barrier",
    "all_gather", "all_gather_single", "_all_gather_base", "all_gather_into_tensor_coalesced",
    "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
})  # fmt: skip
"""Operations with inputs of equal size on all ranks of the group. In other operations the root's sizes differ, or each
rank chooses its sizes."""
_GATHERS = frozenset({"all_gather", "all_gather_single", "_all_gather_base", "all_gather_into_tensor_coalesced"})


@dataclass(frozen=True, slots=True)
class FlightCall:
    """One collective as a rank recorded it."""

    group: str
    sequence: int
    name: str
    sizes: str
    has_started: bool
    """Whether the call has started on the GPU, as far as torch has observed. On gloo: False until the call is over."""
    is_over: bool


@dataclass(frozen=True, slots=True)
class FlightDump:
    """One rank's dump. `members` has no entry for a group without members in the dump.

    num_ranks: world size, from gathers in the default group; 0: not known.
    """

    rank: int
    version: str
    titles: Mapping[str, str]
    """Title of each group, "1:dp" for instance."""
    members: Mapping[str, tuple[int, ...]]
    positions: Mapping[str, Position]
    calls: tuple[FlightCall, ...]
    num_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks whose calls differ in the same collective of a group."""

    group: str
    sequence: int
    calls: Mapping[str, tuple[int, ...]]
    """Call -> the ranks that made it."""


def parse_dump(raw: bytes, rank: int, place: str) -> FlightDump:
    """Parse a rank's dump. Raises: DataError naming `place` and the problem, for anything that is not a JSON dump."""
    if raw[:1] == b"\x80":
        raise DataError(f"{place}: a pickled dump; only JSON dumps can be read: write it with _dump_fr_trace_json()")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list) or "version" not in value:
        raise DataError(f"{place}: not a Flight Recorder dump: expected an object with version and entries")
    if not str(value["version"]).startswith("2."):
        raise DataError(f"{place}: dump version {value['version']!r}; expected 2.x")
    calls, titles = _calls(value["entries"], place)
    status = {
        str(name): _status(group, place) for name, group in _object(value.get("pg_status"), place).items() if name
    }
    positions = {group: _position(group, status, calls) for group in sorted({*status, *(call.group for call in calls)})}
    num_ranks = max((_gathered(entry) for entry in value["entries"] if _is_default(entry)), default=0)
    return FlightDump(rank, str(value["version"]), titles, _members(value, place), positions, calls, num_ranks)


def known_ranks(dumps: Sequence[FlightDump]) -> tuple[int, bool]:
    """Return the number of ranks of the job, and whether it is certain.

    It is certain if a dump has the members of the default group, or the sizes of a gather in it. Otherwise there may be
    ranks above the highest one in the dumps.
    """
    of_default = [len(dump.members.get(_NAME_OF_DEFAULT_GROUP, ())) for dump in dumps]
    named = [dump.rank for dump in dumps] + [ranks[-1] for dump in dumps for ranks in dump.members.values()]
    certain = max([dump.num_ranks for dump in dumps] + of_default)
    return max(certain, 1 + max(named)), certain > 0


def flight_groups(dumps: Sequence[FlightDump], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return group -> members: the members that the dumps list, and all ranks whose dumps have the group.

    num_ranks: number of ranks of the job, which are the members of the default group.
    """
    found: dict[str, set[int]] = {}
    for dump in dumps:
        for group, members in dump.members.items():
            found.setdefault(group, set()).update(members)
        for group in dump.positions:
            is_default = group == _NAME_OF_DEFAULT_GROUP or dump.titles.get(group, "").endswith(_DEFAULT_GROUP)
            found.setdefault(group, set()).update(range(num_ranks) if is_default else (dump.rank,))
    return {group: tuple(sorted(ranks)) for group, ranks in sorted(found.items())}


def flight_activities(dumps: Iterable[FlightDump]) -> dict[int, RankActivity]:
    """Return rank -> its positions in groups, and the newest call that has started and is not completed.

    If no open call has started, it is the newest open call.
    """
    found = {}
    for dump in dumps:
        open_calls = [call for call in dump.calls if not call.is_over]
        # calls that wait in a queue of the GPU are not in flight
        in_flight = [call for call in open_calls if call.has_started] or open_calls
        found[dump.rank] = RankActivity(dump.rank, dump.positions, in_flight[-1].name if in_flight else "")
    return found


def disagreements(dumps: Iterable[FlightDump]) -> tuple[Disagreement, ...]:
    """Return for each group the first collective in which the calls of its members differ."""
    calls: dict[tuple[str, int], dict[str, list[int]]] = {}
    for dump in dumps:
        for call in dump.calls:
            text = f"{call.name} {call.sizes}" if call.name in _EQUAL_SIZES else call.name
            calls.setdefault((call.group, call.sequence), {}).setdefault(text, []).append(dump.rank)
    found: dict[str, Disagreement] = {}
    for (group, sequence), by_call in sorted(calls.items()):
        if len(by_call) > 1 and group not in found:
            ranks_of_call = {text: tuple(sorted(ranks)) for text, ranks in sorted(by_call.items())}
            found[group] = Disagreement(group, sequence, ranks_of_call)
    return tuple(found.values())


def _calls(entries: list[Any], place: str) -> tuple[tuple[FlightCall, ...], dict[str, str]]:
    calls, titles = [], {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{place}: entry {number} is a {type(entry).__name__}, expected an object")
        group = entry.get("process_group")
        if not (isinstance(group, list) and group and all(isinstance(part, str) for part in group)):
            raise DataError(f"{place}: entry {number}: process_group={group!r}, expected [name, description]")
        titles[group[0]] = ":".join(part for part in group if part)
        if entry.get("is_p2p"):
            continue  # not all members take part in a point-to-point call, so it does not show that a rank is missing
        is_over = bool(entry.get("retired")) or entry.get("state") == "completed"
        calls.append(
            FlightCall(
                group[0],
                _whole(entry.get("collective_seq_id"), f"{place}: entry {number}: collective_seq_id"),
                str(entry.get("profiling_name", "")).rpartition(":")[2],
                json.dumps(entry.get("input_sizes", "")),
                is_over or entry.get("state") == "started",
                is_over,
            )
        )
    return tuple(calls), titles


@dataclass(frozen=True, slots=True)
class _GroupStatus:
    """The numbers of a group's last collectives."""

    enqueued: int = _NONE_YET
    started: int = _NONE_YET
    completed: int = _NONE_YET

    @property
    def is_start_known(self) -> bool:
        return self.started != _NONE_YET


def _position(group: str, status: Mapping[str, _GroupStatus], calls: Iterable[FlightCall]) -> Position:
    own, last = [call for call in calls if call.group == group], status.get(group, _GroupStatus())
    entered = max((call.sequence for call in own if call.has_started or not last.is_start_known), default=0)
    finished = max((call.sequence for call in own if call.is_over), default=0)
    last_entered = last.started if last.is_start_known else last.enqueued
    return Position(max(entered, last_entered, last.completed, 0), max(finished, last.completed, 0))


def _status(value: object, place: str) -> _GroupStatus:
    fields = _object(value, place)
    return _GroupStatus(
        *(
            _whole(fields.get(f"last_{which}_collective", _NONE_YET), f"{place}: last_{which}_collective")
            for which in ("enqueued", "started", "completed")
        )
    )


def _members(value: Mapping[str, Any], place: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, group in _object(value.get("pg_config"), place).items():
        text = _object(group, place).get("ranks", "[]")
        try:
            ranks = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            raise DataError(f"{place}: pg_config[{name!r}].ranks={text!r}: not a list of ranks") from error
        if not isinstance(ranks, list):
            raise DataError(f"{place}: pg_config[{name!r}].ranks={text!r}: not a list of ranks")
        members = tuple(sorted({_whole(rank, f"{place}: pg_config[{name!r}].ranks") for rank in ranks}))
        if members:
            if members[0] < 0 or members[-1] >= _MAX_RANKS:
                raise DataError(
                    f"{place}: pg_config[{name!r}].ranks goes from {members[0]} to {members[-1]}; "
                    f"expected ranks from 0 to {_MAX_RANKS - 1}"
                )
            # on gloo the default group has no name here, but a name in the entries
            found[str(name) or _NAME_OF_DEFAULT_GROUP] = members
    return found


def _is_default(entry: Any) -> bool:
    group = entry.get("process_group") if isinstance(entry, dict) else None
    return isinstance(group, list) and _DEFAULT_GROUP in group


def _gathered(entry: Mapping[str, Any]) -> int:
    """Return the number of ranks in a gather, from its sizes; 0 for other entries."""
    if str(entry.get("profiling_name", "")).rpartition(":")[2] not in _GATHERS:
        return 0
    given, received = (_num_elements(entry.get(name)) for name in ("input_sizes", "output_sizes"))
    return min(received // given, _MAX_RANKS) if given and received % given == 0 else 0


def _num_elements(sizes: object) -> int:
    """Return the number of elements of tensors with these shapes; 0 if the shapes are not known."""
    if not isinstance(sizes, list) or not all(isinstance(shape, list) for shape in sizes):
        return 0
    if not all(type(size) is int and size >= 0 for shape in sizes for size in shape):
        return 0
    return sum(math.prod(shape) for shape in sizes)


def _object(value: object, place: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{place}: a {type(value).__name__} where a dump has an object")
    return value


def _whole(value: object, what: str) -> int:
    problem = f"{what}={value!r}: expected a whole number"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise DataError(problem)
    try:
        return int(value)
    except ValueError as error:
        raise DataError(problem) from error

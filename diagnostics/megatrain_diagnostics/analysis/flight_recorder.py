"""Dumps of torch's Flight Recorder, in their JSON form, as standings of ranks and disagreements about collectives.

The dump's own summary of a group, `pg_status`, has precedence: on gloo no entry ever gets another state than
"scheduled", and only `retired` and the summary show what is over. On NCCL `pg_config` names the members; on gloo it is
empty, and the members are the ranks whose dumps contain the group. Where ranks disagree about a group, the difference
at the first such sequence number is reported: another operation, or other sizes. Form: version 2.x of torch 2.5 to
2.13.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.contracts.errors import DataError
from megatrain.failures.hang import Position
from megatrain_diagnostics.analysis.hang import RankStanding

_NONE_YET = -1
_MAX_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class FlightCall:
    """One collective as a rank recorded it."""

    group: str
    sequence: int
    name: str
    sizes: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class FlightDump:
    """One rank's dump. `members` has no entry for a group whose members are not in the dump."""

    rank: int
    version: str
    titles: Mapping[str, str]
    """Title of each group, "1:dp" for instance."""
    members: Mapping[str, tuple[int, ...]]
    positions: Mapping[str, Position]
    calls: tuple[FlightCall, ...]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that called different things as the same collective of a group."""

    group: str
    sequence: int
    calls: Mapping[str, tuple[int, ...]]
    """Call -> the ranks that made it."""


def parse_dump(raw: bytes, rank: int, place: str) -> FlightDump:
    """Return a rank's dump. Raises: DataError naming the place and the error, for anything that is no dump."""
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
    status = {str(name): _status(one, place) for name, one in _object(value.get("pg_status"), place).items() if name}
    positions = {group: _position(group, status, calls) for group in sorted({*status, *(one.group for one in calls)})}
    return FlightDump(rank, str(value["version"]), titles, _members(value, place), positions, calls)


def flight_groups(dumps: Iterable[FlightDump]) -> dict[str, tuple[int, ...]]:
    """Return the members of each group: by the dumps, else all ranks whose dumps contain it."""
    found: dict[str, set[int]] = {}
    for dump in dumps:
        for group, members in dump.members.items():
            found.setdefault(group, set()).update(members)
        for group in dump.positions:
            found.setdefault(group, set()).add(dump.rank)
    return {group: tuple(sorted(ranks)) for group, ranks in sorted(found.items())}


def flight_standings(dumps: Iterable[FlightDump]) -> dict[int, RankStanding]:
    """Return where each rank stands, and its newest call that is not over."""
    found = {}
    for dump in dumps:
        open_calls = [one for one in dump.calls if not one.is_over]
        found[dump.rank] = RankStanding(dump.rank, dump.positions, open_calls[-1].name if open_calls else "")
    return found


def disagreements(dumps: Iterable[FlightDump]) -> tuple[Disagreement, ...]:
    """Return for each group the first collective that its members called differently."""
    calls: dict[tuple[str, int], dict[str, list[int]]] = {}
    for dump in dumps:
        for one in dump.calls:
            call = f"{one.name} {one.sizes}".strip()
            calls.setdefault((one.group, one.sequence), {}).setdefault(call, []).append(dump.rank)
    found: dict[str, Disagreement] = {}
    for (group, sequence), by_call in sorted(calls.items()):
        if len(by_call) > 1 and group not in found:
            ranks_of_call = {call: tuple(sorted(ranks)) for call, ranks in sorted(by_call.items())}
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
            continue  # not every member takes part in these: they do not prove that a rank is missing
        calls.append(
            FlightCall(
                group[0],
                _whole(entry.get("collective_seq_id"), f"{place}: entry {number}: collective_seq_id"),
                str(entry.get("profiling_name", "")).rpartition(":")[2],
                json.dumps(entry.get("input_sizes", "")),
                bool(entry.get("retired")) or entry.get("state") == "completed",
            )
        )
    return tuple(calls), titles


def _position(group: str, status: Mapping[str, tuple[int, int]], calls: Iterable[FlightCall]) -> Position:
    own = [one for one in calls if one.group == group]
    entered = max((one.sequence for one in own), default=0)
    finished = max((one.sequence for one in own if one.is_over), default=0)
    status_entered, status_finished = status.get(group, (_NONE_YET, _NONE_YET))
    return Position(max(entered, status_entered, 0), max(finished, status_finished, 0))


def _status(value: object, place: str) -> tuple[int, int]:
    """Return the numbers of the last collective that was enqueued and of the last that was completed."""
    fields = _object(value, place)
    return (
        _whole(fields.get("last_enqueued_collective", _NONE_YET), f"{place}: last_enqueued_collective"),
        _whole(fields.get("last_completed_collective", _NONE_YET), f"{place}: last_completed_collective"),
    )


def _members(value: Mapping[str, Any], place: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, one in _object(value.get("pg_config"), place).items():
        text = _object(one, place).get("ranks", "[]")
        try:
            ranks = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            raise DataError(f"{place}: pg_config[{name!r}].ranks={text!r}: not a list of ranks") from error
        if not isinstance(ranks, list):
            raise DataError(f"{place}: pg_config[{name!r}].ranks={text!r}: not a list of ranks")
        members = tuple(sorted({_whole(rank, f"{place}: pg_config[{name!r}].ranks") for rank in ranks}))
        if name and members:
            if members[0] < 0 or members[-1] >= _MAX_RANKS:
                raise DataError(f"{place}: pg_config[{name!r}].ranks goes from {members[0]} to {members[-1]}")
            found[str(name)] = members
    return found


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

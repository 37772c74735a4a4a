"""Clusters the stacks of many ranks: ranks in large clusters are healthy, the outliers contain the culprit.

Stacks are normalized (without line numbers, other numbers, and paths above the package) and grouped by equality; then
groups with nearly the same frames are merged. Ranks that wait in an exchange are victims. The other ranks are the
outliers, if they are not the majority. If all ranks wait, or most do not, the ranks of small groups are the outliers. A
rank without a dump is an outlier too, because it could not write one. The smallest parallel group with all outliers is
the one to evict (ByteRobust sec. 5, stack aggregation and over-eviction).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from megatrain.contracts.layout import REPLICAS, STAGES, Layout
from megatrain.formatting import count_text
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Stacks

MAIN_THREAD = "MainThread"
_ALIKE = 0.9
"""Fraction of the frames that stacks of one group must share: the depth of library frames differs while waiting."""
_DOMINANT = 0.5
"""If all ranks wait, or most do not: groups of at least this fraction of the largest group are healthy."""
_MAX_DISTINCT = 512
"""Limit of the different stacks that are compared for similarity; the rarest stacks beyond it are not merged."""
_LINE = re.compile(r"^(?P<file>.+?):\d+ (?P<name>.+)$")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_WAITS = re.compile(r"(comm/\w+\.py|distributed/distributed_c10d\.py|(\S+/)?threading\.py) ")
_OF_COMMUNICATION = re.compile(r"(comm/\w+\.py|distributed/distributed_c10d\.py) ")


@dataclass(frozen=True, slots=True)
class StackCluster:
    """Ranks with similar stacks. `frames`: the most common stack, outermost first, such as "comm/group.py wait"."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]
    is_waiting: bool
    """Whether the innermost frames wait for other ranks."""


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """The smallest parallel group that contains some ranks.

    kind: rank, host, replica, stage, or the name of a group along one or several axes, such as dp or dp-cp.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackFinding:
    """Clusters, the largest first; outliers; the smallest group with all outliers, None if it is the whole job."""

    clusters: tuple[StackCluster, ...]
    outliers: tuple[int, ...]
    undumped: tuple[int, ...]
    """Ranks without a dump, if other ranks have one."""
    shared: SharedGroup | None
    reason: str


def normalized(stack: str) -> tuple[str, ...]:
    """Return the frames of a stack (one "file:line function" per line) without details that differ between ranks."""
    frames = []
    for line in stack.splitlines():
        match = _LINE.match(line.strip())
        if match is None:
            if line.strip():
                frames.append(_NUMBERS.sub("#", line.strip()))
            continue
        file = "/".join(match["file"].replace("\\", "/").split("/")[-2:])
        frames.append(f"{file} {match['name']}")
    return tuple(frames)


def newest_main_stacks(stacks: Stacks, round_number: int) -> dict[int, str]:
    """Return rank -> newest stack of its main thread, or of another thread if the newest dump has no main thread."""
    found: dict[int, tuple[tuple[int, bool], str]] = {}
    for row in range(len(stacks.rank)):
        if stacks.round[row] != round_number:
            continue
        rank, order = int(stacks.rank[row]), (int(stacks.at_ns[row]), stacks.thread[row] == MAIN_THREAD)
        if rank not in found or order > found[rank][0]:
            found[rank] = (order, str(stacks.stack[row]))
    return {rank: text for rank, (_, text) in found.items()}


def find_outliers(stacks: Mapping[int, str], roster: Roster, asked: Iterable[int] | None = None) -> StackFinding:
    """Cluster the stacks of the ranks' main threads, and find the outliers.

    `asked`: the ranks that should have a stack; None: all ranks, if any rank has one.
    """
    clusters = cluster(stacks)
    expected = range(roster.layout.world_size) if asked is None else sorted(asked)
    undumped = tuple(rank for rank in expected if rank not in stacks) if stacks else ()
    odd, reason = _odd_ones(clusters)
    outliers = tuple(sorted({*odd, *undumped}))
    if undumped:
        reason = (
            f"{reason}; {len(undumped)} without a dump"
            if odd
            else f"{count_text(len(undumped), 'rank')} without a dump"
        )
    shared = smallest_group(outliers, roster) if outliers else None
    return StackFinding(clusters, outliers, undumped, shared, reason)


def cluster(stacks: Mapping[int, str]) -> tuple[StackCluster, ...]:
    """Return the clusters of similar stacks, the largest first."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        by_text.setdefault(stacks[rank], []).append(rank)
    equal: dict[tuple[str, ...], list[int]] = {}
    for text, ranks in by_text.items():
        equal.setdefault(normalized(text), []).extend(ranks)
    merged: list[tuple[tuple[str, ...], list[int]]] = []
    for place, (frames, ranks) in enumerate(sorted(equal.items(), key=lambda item: (-len(item[1]), item[1]))):
        like = (
            next((entry for entry in merged if _are_alike(entry[0], frames)), None) if place < _MAX_DISTINCT else None
        )
        if like is None:
            merged.append((frames, list(ranks)))
        else:
            like[1].extend(ranks)
    found = [StackCluster(tuple(sorted(ranks)), frames, is_waiting(frames)) for frames, ranks in merged]
    return tuple(sorted(found, key=lambda stack_cluster: (-len(stack_cluster.ranks), stack_cluster.ranks)))


def is_waiting(frames: tuple[str, ...]) -> bool:
    """Return whether the innermost frame is in a communication file, or in a lock called from one."""
    if not frames or not _WAITS.match(frames[-1]):
        return False
    return any(_OF_COMMUNICATION.match(frame) for frame in frames[-4:])


def smallest_group(ranks: Iterable[int], roster: Roster) -> SharedGroup | None:
    """Return the smallest parallel group that contains all these ranks; None if only the whole job does."""
    wanted = set(ranks)
    first = min(wanted)
    layout = roster.layout
    candidates = [SharedGroup("rank", f"rank {first}", (first,))]
    if host := roster.host_of(first):
        candidates.append(SharedGroup("host", host, roster.ranks_on(host)))
    candidates += [_group_along((axis,), first, layout) for axis in layout.innermost_first]
    candidates += [_group_along(axes, first, layout) for axes in layout.replica_spans]
    candidates += [
        SharedGroup(kind, layout.place_text(first, axis), layout.ranks_along(first, *layout.others_of(axis)))
        for kind, axis in (("replica", REPLICAS[0]), ("stage", STAGES))
    ]
    holding = [
        group for group in candidates
        if wanted <= set(group.ranks) and len(group.ranks) < max(2, layout.world_size)
    ]  # fmt: skip
    return min(holding, key=lambda group: len(group.ranks), default=None)


def _group_along(axes: Sequence[str], first: int, layout: Layout) -> SharedGroup:
    name = layout.group_name(axes)
    kind = "pipeline" if name == STAGES else f"{name} group"
    others = [axis for axis in layout.others_of(axes[0]) if axis not in axes]
    return SharedGroup(name, f"{kind} of {layout.place_text(first, *others)}", layout.ranks_along(first, *axes))


def _are_alike(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    if is_waiting(left) != is_waiting(right):
        return False
    shared = sum((Counter(left) & Counter(right)).values())
    if 2 * shared < _ALIKE * (len(left) + len(right)):  # an upper bound of the ratio, and much cheaper
        return False
    return SequenceMatcher(None, left, right, autojunk=False).ratio() >= _ALIKE


def _odd_ones(clusters: tuple[StackCluster, ...]) -> tuple[set[int], str]:
    waiting = sum(len(stack_cluster.ranks) for stack_cluster in clusters if stack_cluster.is_waiting)
    working = {rank for stack_cluster in clusters if not stack_cluster.is_waiting for rank in stack_cluster.ranks}
    if waiting and working and len(working) <= waiting:
        return working, f"{count_text(waiting, 'rank')} waiting in a collective or a transfer, {len(working)} not"
    sizes = [len(stack_cluster.ranks) for stack_cluster in clusters]
    small = {
        rank
        for stack_cluster in clusters
        if len(stack_cluster.ranks) < _DOMINANT * max(sizes)
        for rank in stack_cluster.ranks
    }
    if small:
        return small, f"{count_text(len(small), 'rank')} with another stack than most"
    return set(), "no stack differs from the others"

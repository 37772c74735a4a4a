"""Chooses the hosts of a round and their ranks. Pure functions: no I/O and no clock.

Ranks are stable: a host keeps its ranks where possible, and a spare takes over those of a host that left, so that the
snapshots in the hosts' memory stay usable. The first round follows the topology: hosts of one switch get neighboring
ranks (dp next to tp: MegaScale sec. 3.5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megatrain.contracts.natural_order import NaturalKey, natural_order
from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.rounds import Round, RoundHost

_FIRST_LABEL = "switch"


def topology_key(record: HostRecord) -> tuple[tuple[tuple[int, str, NaturalKey], ...], NaturalKey]:
    """Return a sort key: the switch, then the other labels, then the host's name."""
    names = sorted(record.labels, key=lambda name: (name != _FIRST_LABEL, name))
    return tuple(
        (int(name != _FIRST_LABEL), name, natural_order(record.labels[name])) for name in names
    ), natural_order(record.host)


def choose(available: Mapping[str, HostRecord], previous: Round | None, count: int) -> tuple[HostRecord, ...]:
    """Return the hosts of the next round, in the order of their ranks. At least `count` must be available.

    Hosts of the previous round are chosen first, then the spares that share the most labels with them.
    """
    slots = {} if previous is None else {part.host: slot for slot, part in enumerate(previous.hosts)}
    members = sorted(
        (record for name, record in available.items() if name in slots), key=lambda host_record: slots[host_record.host]
    )
    spares = [record for name, record in available.items() if name not in slots]
    chosen = members[:count]
    if len(chosen) < count:
        shared = Counter(item for anchor in chosen or spares for item in anchor.labels.items())
        spares.sort(
            key=lambda host_record: (
                -sum(shared[item] for item in host_record.labels.items()),
                topology_key(host_record),
            )
        )
        chosen += spares[: count - len(chosen)]
    if previous is None:
        return tuple(sorted(chosen, key=topology_key))
    return _assign_slots(chosen, slots, count)


def _assign_slots(chosen: Sequence[HostRecord], slots: Mapping[str, int], count: int) -> tuple[HostRecord, ...]:
    """Assign each host its previous slot if that still exists; assign free slots to the others in topology order."""
    by_slot: dict[int, HostRecord] = {}
    without_slot: list[HostRecord] = []
    for record in chosen:
        slot = slots.get(record.host, count)
        if slot < count:
            by_slot[slot] = record
        else:
            without_slot.append(record)
    free = (slot for slot in range(count) if slot not in by_slot)
    by_slot.update(zip(free, sorted(without_slot, key=topology_key), strict=True))
    return tuple(by_slot[slot] for slot in range(count))


def parts_of(records: Sequence[HostRecord], num_workers: int) -> tuple[RoundHost, ...]:
    """Return the `hosts` field of a round with these hosts in this order."""
    return tuple(
        RoundHost(record.host, record.session, record.address, slot * num_workers, num_workers, record.liveness_port)
        for slot, record in enumerate(records)
    )

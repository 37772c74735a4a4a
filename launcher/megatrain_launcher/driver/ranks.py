"""Which hosts take part in a round, and with which ranks. Pure.

Ranks are stable: a host keeps its place while it can, and a spare takes the place of the host that went, so that local
snapshots stay useful. The first placement follows the topology: hosts of one switch are neighbours, and neighbours have
neighbouring ranks (dp next to tp: MegaScale sec. 3.5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megatrain.contracts.host_records import HostRecord
from megatrain.contracts.rounds import Round, RoundHost
from megatrain.contracts.texts import NaturalKey, natural_order

_FIRST_LABEL = "switch"


def topology_key(record: HostRecord) -> tuple[tuple[tuple[int, str, NaturalKey], ...], NaturalKey]:
    """Return a sort key: the switch, then the other labels, then the host's name."""
    names = sorted(record.labels, key=lambda name: (name != _FIRST_LABEL, name))
    return tuple(
        (int(name != _FIRST_LABEL), name, natural_order(record.labels[name])) for name in names
    ), natural_order(record.host)


def choose(available: Mapping[str, HostRecord], previous: Round | None, count: int) -> tuple[HostRecord, ...]:
    """Return the hosts of the next round, in the order of their ranks. There must be `count` of them.

    Hosts of the round before come first, then spares, those that share most labels with the others before the rest.
    """
    slots = {} if previous is None else {part.host: slot for slot, part in enumerate(previous.hosts)}
    members = sorted((record for name, record in available.items() if name in slots), key=lambda one: slots[one.host])
    spares = [record for name, record in available.items() if name not in slots]
    chosen = members[:count]
    if len(chosen) < count:
        shared = Counter(item for anchor in chosen or spares for item in anchor.labels.items())
        spares.sort(key=lambda one: (-sum(shared[item] for item in one.labels.items()), topology_key(one)))
        chosen += spares[: count - len(chosen)]
    if previous is None:
        return tuple(sorted(chosen, key=topology_key))
    return _seat(chosen, slots, count)


def _seat(chosen: Sequence[HostRecord], slots: Mapping[str, int], count: int) -> tuple[HostRecord, ...]:
    """Give each host its slot of before where it has one, and the free slots to the others in topology order."""
    seats: dict[int, HostRecord] = {}
    standing: list[HostRecord] = []
    for record in chosen:
        slot = slots.get(record.host, count)
        if slot < count:
            seats[slot] = record
        else:
            standing.append(record)
    free = (slot for slot in range(count) if slot not in seats)
    seats.update(zip(free, sorted(standing, key=topology_key), strict=True))
    return tuple(seats[slot] for slot in range(count))


def parts_of(records: Sequence[HostRecord], num_workers: int) -> tuple[RoundHost, ...]:
    """Return the parts of a round with these hosts in this order."""
    return tuple(
        RoundHost(record.host, record.session, record.address, slot * num_workers, num_workers, record.liveness_port)
        for slot, record in enumerate(records)
    )

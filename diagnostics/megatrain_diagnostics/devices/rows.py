"""Converts readings of a host's devices to rows of the tables, with rank and step. Pure functions: no I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Gpus, NetworkLinks, Table, Xids, columns_of, from_columns, num_rows
from megatrain_job.devices.gpu_readings import GpuReading
from megatrain_job.devices.links import LinkReading

MAX_DEVICES = 64
"""Limit of devices per kind and host; further ones are left out. Each device is a row every few seconds."""
DeviceTable = TypeVar("DeviceTable", Gpus, NetworkLinks, Xids)
_NO_VALUE = math.nan
_ALL = -1
_NS = 1e9


@dataclass(frozen=True, slots=True)
class HostPlace:
    """The ranks of a host. `ranks`: UUID of a GPU -> (rank, step); `step`: newest step on the host; -1: none."""

    host: str
    round: int = -1
    step: int = -1
    ranks: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def device_tables(sample: HostSample, place: HostPlace) -> list[tuple[type[Table], Table]]:
    """Return the rows of a sample, as (table class, table); empty tables are left out."""
    at_ns = int(sample.at_unix_s * _NS)
    gpus = [_gpu_row(gpu, place, at_ns) for gpu in sample.driver.gpus[:MAX_DEVICES]]
    if sample.driver.error:
        gpus.append(_gpu_row(GpuReading(_ALL, error=sample.driver.error), place, at_ns))
    links = [_link_row(link, place, at_ns) for link in sample.links[:MAX_DEVICES]]
    numbers = {gpu.uuid: gpu.index for gpu in sample.driver.gpus}
    xids = [
        {
            **_at(place, event.uuid), "at_ns": int(event.at_unix_s * _NS), "gpu": numbers.get(event.uuid, _ALL),
            "xid": event.number, "uuid": event.uuid,
        }
        for event in sample.xids
    ]  # fmt: skip
    found: list[tuple[type[Table], Table]] = [
        (Gpus, _table(Gpus, gpus)), (NetworkLinks, _table(NetworkLinks, links)), (Xids, _table(Xids, xids)),
    ]  # fmt: skip
    return [(kind, table) for kind, table in found if num_rows(table)]


def silence_table(why: str, place: HostPlace, at_ns: int) -> Gpus:
    """Return a row about all GPUs of a host with the reason why there are no readings."""
    return _table(Gpus, [_gpu_row(GpuReading(_ALL, error=why), place, at_ns)])


def is_reset_pending(gpu: GpuReading) -> bool | None:
    """Return whether the next reset of a GPU retires a bad page or row; None: not reported."""
    pending = {gpu.is_page_retirement_pending, gpu.is_row_remap_pending} - {None}
    return any(pending) if pending else None


def _gpu_row(gpu: GpuReading, place: HostPlace, at_ns: int) -> dict[str, Any]:
    readings = {field_.name: getattr(gpu, field_.name) for field_ in fields(gpu)}
    return {
        **readings,
        **_at(place, gpu.uuid),
        "at_ns": at_ns,
        "gpu": gpu.index,
        "recovery": gpu.recovery_action,
        "is_reset_pending": is_reset_pending(gpu),
        "has_remap_failed": gpu.has_row_remap_failed,
    }


def _link_row(link: LinkReading, place: HostPlace, at_ns: int) -> dict[str, Any]:
    readings = {field_.name: getattr(link, field_.name) for field_ in fields(link)}
    return {**readings, **_at(place, ""), "at_ns": at_ns, "link": link.name, "downs": link.num_downs}


def _at(place: HostPlace, uuid: str) -> dict[str, Any]:
    rank, step = place.ranks.get(uuid, (_ALL, place.step))
    return {"host": place.host, "round": place.round, "rank": rank, "step": step}


def _table(kind: type[DeviceTable], rows: Sequence[Mapping[str, Any]]) -> DeviceTable:
    columns = {
        name: [_NO_VALUE if row[name] is None and dtype == "f8" else row[name] for row in rows]
        for name, dtype in columns_of(kind).items()
    }
    return from_columns(kind, columns)

"""The devices of a host: which rank uses which GPU, in which step, and the rows to stream.

The UUID of a GPU is the key that joins megatrain's metrics with those of NVIDIA's DCGM exporter. It is read from the
driver's files in /proc, without loading a library. A worker uses the device at the index of its local rank in
CUDA_VISIBLE_DEVICES, whose numbers count the GPUs by PCI address; if it is not set, all GPUs are listed by PCI address.
A rank on a MIG device is assigned that device's GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Protocol

from megatrain_diagnostics.devices.rows import HostPlace, device_tables, silence_table
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Gpus
from megatrain_diagnostics.metrics.readings import DevicesReading
from megatrain_diagnostics.streamer.rank_tail import RankTail, Tables

_REPEAT_NS = 30 * 10**9
DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", re.MULTILINE)
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/\d+/\d+")


class DeviceSource(Protocol):
    """The reader of the devices: devices.supervisor.DeviceSupervisor."""

    @property
    def newest(self) -> HostSample | None: ...

    @property
    def problem(self) -> str:
        """The reason why there are no samples, or the driver's error in the newest one; empty if there is neither."""

    def take(self) -> list[HostSample]:
        """Return the samples since the last call."""


class HostDevices:
    """The devices of one host. `poll` is for one thread, the rest for any. `visible`: CUDA_VISIBLE_DEVICES, if set."""

    def __init__(self, host: str, visible: str | None, source: DeviceSource | None) -> None:
        self._host, self._visible, self._source = host, visible, source
        self._uuids = gpu_uuids(visible, driver_uuids())
        self._uuid_of: dict[int, str] = {}
        """GPU number of the driver -> UUID."""
        self._xids: dict[tuple[str, int], int] = {}
        self._last_problem: tuple[str, int] = ("", 0)
        """The problem that was reported last, and its time in ns."""

    @property
    def reading(self) -> DevicesReading | None:
        """Return the newest reading; None if devices are not read."""
        source = self._source
        if source is None:
            return None
        return DevicesReading(source.newest, source.problem, dict(self._xids))

    def poll(self, tails: Sequence[RankTail], round_number: int, now_ns: int) -> Tables:
        """Return the rows since the last poll. `tails`: the tails of the newest round's ranks."""
        source = self._source
        if source is None:
            return []
        found: Tables = []
        samples = [self._named(sample) for sample in source.take()]
        for sample in samples:
            self._take_gpus(sample)
            for event in sample.xids:
                self._xids[event.uuid, event.number] = self._xids.get((event.uuid, event.number), 0) + 1
        place = self._place(tails, round_number) if samples or source.problem else HostPlace(self._host)
        for sample in samples:
            found += device_tables(sample, place)
        if source.problem and not samples:
            found += self._silence(source.problem, place, now_ns)
        return found

    def with_gpus(self, tails: Sequence[RankTail]) -> Iterator[tuple[RankTail, str]]:
        """Yield (tail of a rank, UUID of its GPU) in the order of ranks; the UUID is "" if it is not known."""
        ordered = sorted(tails, key=lambda tail: tail.identity.rank)
        return zip(ordered, chain(self._uuids, repeat("")), strict=False)

    def _named(self, sample: HostSample) -> HostSample:
        """Return the sample with the last known UUID for each lost GPU, which cannot report its UUID."""
        gpus = sample.driver.gpus
        self._uuid_of |= {gpu.index: gpu.uuid for gpu in gpus if gpu.uuid}
        if all(gpu.uuid for gpu in gpus):
            return sample
        named = tuple(replace(gpu, uuid=gpu.uuid or self._uuid_of.get(gpu.index, "")) for gpu in gpus)
        return replace(sample, driver=replace(sample.driver, gpus=named))

    def _take_gpus(self, sample: HostSample) -> None:
        """Use the UUIDs in a sample: a container may hide the files in /proc, and they do not list MIG devices."""
        gpus = sample.driver.gpus
        if gpus and all(gpu.uuid for gpu in gpus):
            mig = {uuid: gpu.uuid for gpu in gpus for uuid in gpu.mig_uuids}
            self._uuids = gpu_uuids(self._visible, [gpu.uuid for gpu in gpus], mig)

    def _place(self, tails: Sequence[RankTail], round_number: int) -> HostPlace:
        steps = {tail.identity.rank: _step_of(tail) for tail in tails}
        ranks = {uuid: (tail.identity.rank, _step_of(tail)) for tail, uuid in self.with_gpus(tails) if uuid}
        newest = max((tail.identity.round for tail in tails), default=round_number)
        return HostPlace(self._host, newest or -1, max(steps.values(), default=-1), ranks)

    def _silence(self, why: str, place: HostPlace, now_ns: int) -> Tables:
        problem, at_ns = self._last_problem
        if problem == why and now_ns - at_ns < _REPEAT_NS:
            return []
        self._last_problem = (why, now_ns)
        return [(Gpus, silence_table(why, place, now_ns))]


def _step_of(tail: RankTail) -> int:
    """Return the step that a rank is computing, or else its last completed step; -1: none."""
    progress = tail.progress
    return next((step for step in (progress.current_step, progress.completed_step) if step is not None), -1)


def driver_uuids(directory: Path = DRIVER_FILES) -> tuple[str, ...]:
    """Return the UUIDs of a host's GPUs by PCI address; empty if there is no GPU, or a file cannot be read."""
    found = []
    for path in sorted(directory.glob("*/information")):
        try:
            match = _UUID.search(path.read_text(errors="replace"))
        except OSError:
            return ()
        found.append(match[1] if match else "")
    return tuple(found)


def gpu_uuids(visible: str | None, found: Sequence[str], mig: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the UUIDs by local rank.

    `visible`: the value of CUDA_VISIBLE_DEVICES, None if it is not set; `found`: the host's GPUs by PCI address;
    `mig`: UUID of a MIG device -> UUID of its GPU.
    """
    if visible is None:
        return tuple(found)
    chosen = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        if word.isascii() and word.isdigit() and int(word) < len(found):
            chosen.append(found[int(word)])
        elif word.startswith("GPU-"):
            # a prefix of a UUID is allowed
            chosen.append(next((uuid for uuid in found if uuid.startswith(word)), ""))
        elif old := _OLD_MIG.fullmatch(word):
            chosen.append(old[1])
        elif word.startswith("MIG-"):
            chosen.append((mig or {}).get(word, ""))
        else:
            break  # CUDA ignores a device that does not exist, and all devices after it
    return tuple(chosen)

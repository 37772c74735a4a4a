"""Evidence from GPUs and links for a straggler: whether and why a GPU's clock fell, and problems of links."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.contracts.records.host_verdict import Cause
from megatrain.formatting import count_text
from megatrain_diagnostics.analysis.device_states import LIMITS, gpu_name, mhz_text
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Float64, Gpus, NetworkLinks, num_rows, select
from megatrain_job.devices.gpu_readings import FAULTY_REASONS, throttle_text

_logger = logging.getLogger(__name__)
MAX_RANKS = 4
"""Evidence is returned for at most this many ranks or hosts of a finding, the worst first."""
_IDLE = 0x1
"""This bit of the throttle reasons means that the GPU has no work, so it explains no slowness."""
_NUM_CURRENT = 3
"""The current clock is the median of this many newest readings, because clocks fluctuate."""
_CAUSES_IN_GPU = frozenset({Cause.COMPUTE, Cause.STAGE, Cause.UNKNOWN})
"""Causes of a finding that a low clock or a fault of the GPU may explain."""
_ERRORS = ("rx_errors", "tx_errors", "symbol_errors")


def with_devices(events: EventSource, finding: Finding, round_number: int, first_ns: int | None = None) -> Finding:
    """Return a finding of a round with evidence from GPUs and links appended.

    `first_ns`: earlier readings are ignored. The finding is unchanged if readings cannot be read.
    """
    where = Where((round_number,), first_ns=first_ns)
    try:
        gpus = events.read(Gpus, replace(where, ranks=finding.ranks[:MAX_RANKS]))
        links = events.read(NetworkLinks, replace(where, hosts=finding.hosts[:MAX_RANKS]))
    except DataError as error:
        _logger.warning("the device readings for a finding cannot be read: %s", error)
        return finding
    sentences = device_evidence(finding, gpus, links)
    return replace(finding, evidence=(*finding.evidence, *sentences)) if sentences else finding


def device_evidence(finding: Finding, gpus: Gpus, links: NetworkLinks) -> tuple[str, ...]:
    """Return the evidence as sentences with numbers, if any. The rows must be of the finding's round."""
    if finding.cause is Cause.NETWORK:
        return _of_links(finding, links)
    if finding.cause not in _CAUSES_IN_GPU:
        return ()
    sentences = []
    for rank in finding.ranks[:MAX_RANKS]:
        rows = select(gpus, (gpus.rank == rank) & (gpus.gpu >= 0))
        if num_rows(rows):
            sentences.append(_of_gpu(select(rows, np.argsort(rows.at_ns, kind="stable")), finding.first_step))
    return tuple(sentences)


def _of_gpu(rows: Gpus, first_step: int) -> str:
    """Return a sentence about the clock of one GPU, from its readings by time; the finding begins at `first_step`."""
    subject = f"its {gpu_name(int(rows.gpu[-1]), str(rows.host[-1]), int(rows.rank[-1]))}"
    if rows.error[-1]:
        return f"{subject} does not answer its driver: {rows.error[-1]}"
    is_before = rows.step < first_step
    before = _median(rows.sm_clock_mhz[is_before])
    usual = before if not np.isnan(before) else _median(rows.max_sm_clock_mhz)
    now = _median(rows.sm_clock_mhz[~is_before][-_NUM_CURRENT:])
    if np.isnan(now) or np.isnan(usual):
        return f"{subject}: its SM clock is not known; {_state(rows)}"
    share = 1.0 - now / usual
    if share < LIMITS.clock_drop:
        what = "as before" if not np.isnan(before) else f"of {mhz_text(usual)}"
        return f"{subject}: SM clock {mhz_text(now)} {what}, {_state(rows)}: the clock is not the cause"
    is_low = ~(rows.sm_clock_mhz >= (1.0 - LIMITS.clock_drop) * usual) & ~np.isnan(rows.sm_clock_mhz)
    since = rows.step[is_low & ((~is_before) | (rows.step < 0))]
    when = f" since step {since[0]}" if len(since) and not np.isnan(before) and since[0] >= 0 else ""
    limit = f"reported if it drops by {100 * LIMITS.clock_drop:.0f} % or more"
    return f"{subject}: SM clock {mhz_text(usual)} -> {mhz_text(now)}{when} ({limit}), {_state(rows)}"


def _state(rows: Gpus) -> str:
    """Return the temperature of the GPU and why it is throttled, from the newest reading."""
    bits = rows.throttle_reasons[-1]
    reasons = "throttle reasons not known" if np.isnan(bits) else throttle_text(int(bits) & ~_IDLE) or "not throttled"
    heat, limit = rows.temperature_c[-1], rows.slowdown_temperature_c[-1]
    if np.isnan(heat):
        return reasons
    is_hot = not np.isnan(bits) and int(bits) & FAULTY_REASONS
    own = f" (it slows down at {limit:.0f} C)" if is_hot and not np.isnan(limit) else ""
    return f"{reasons}, {heat:.0f} C{own}"


def _of_links(finding: Finding, links: NetworkLinks) -> tuple[str, ...]:
    sentences = []
    for host in finding.hosts[:MAX_RANKS]:
        for name in sorted(set(links.link[links.host == host].tolist())):
            rows = select(links, (links.host == host) & (links.link == name))
            text = _of_link(select(rows, np.argsort(rows.at_ns, kind="stable")))
            if text:
                sentences.append(f"link {name} of {host} {text}")
    return tuple(sentences)


def _of_link(rows: NetworkLinks) -> str:
    """Return the problem of one link, from its readings by time, as the rest of a sentence; empty without one."""
    best, now = np.nanmax(np.append(rows.speed_mbps, 0.0)), rows.speed_mbps[-1]
    grown = {name: int(_grown(getattr(rows, name))) for name in (*_ERRORS, "downs")}
    errors = sum(grown[name] for name in _ERRORS)
    if rows.is_up[-1] != 1.0 and (rows.is_up == 1.0).any():
        return f"is {rows.state[-1]}"
    if now < best:
        return f"runs at {now / 1000:g} Gbit/s, down from {best / 1000:g}"
    if grown["downs"] or errors >= LIMITS.link_errors:
        return (
            f"had {count_text(errors, 'error')} (threshold: {LIMITS.link_errors:,}) and changed its state "
            f"{count_text(grown['downs'], 'time')}"
        )
    return ""


def _grown(values: Float64) -> float:
    """Return by how much a counter grew over its readings, in order; after a reset it counts from zero."""
    known = values[~np.isnan(values)]
    steps = np.diff(known)
    return float(np.where(steps >= 0.0, steps, known[1:]).sum())


def _median(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")

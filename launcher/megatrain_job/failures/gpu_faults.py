"""Uses the errors of GPUs in the kernel's logs in the judgment of a hang (ADR 0079). Pure functions.

The rules for logs decide which message is a failure of its own (`rules/gpu.py`, by the table of Xid numbers): a
broken GPU, or a program whose work the GPU driver ended. Errors that the GPU driver handled and consequences of other
errors are not failures. A message names a host, not a rank: several ranks share a host.

| the positions name | errors | verdict |
|---|---|---|
| ranks | on each of their hosts | the same, now certain, with the causes |
| ranks of several hosts, not for certain | on one of them | its ranks only |
| ranks of several hosts | on some of them, in other cases | the same, with the causes |
| ranks | only on other hosts | the same; the contradiction is reported |
| no rank, or a cycle | on one host of those that may be at fault | that host; its rank if there is only one |
| no rank, or a cycle | on several of those hosts, or only on other hosts | the same; the errors are reported |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatrain.formatting import names_text
from megatrain_job.failures.bundle import read_rank
from megatrain_job.failures.hang import Confidence, HangReport
from megatrain_job.failures.verdict import FailureAction
from megatrain_job.failures.xids import xid_of

_MAX_LISTED = 4


@dataclass(frozen=True, slots=True)
class GpuFault:
    """An error of a GPU that can stop the work of a rank."""

    host: str
    number: int
    gpu: str
    """Its PCI address."""
    meaning: str
    age_s: float
    """Seconds before the evidence of the hang was taken."""
    action: FailureAction
    """The action for the host, by the rule that matches the message."""

    @property
    def text(self) -> str:
        """A sentence on the error."""
        what = f"Xid {self.number} of GPU {self.gpu} ({self.meaning})"
        return f"{self.host} reported {what} {self.age_s:.0f} s before the evidence was taken"


@dataclass(frozen=True, slots=True)
class HangBlame:
    """The suspects of a hang, from positions and errors. `reasons`: sentences on the errors, strongest first."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    confidence: Confidence
    reasons: tuple[str, ...] = ()


def xid_line(gpu: str, number: int, text: str) -> str:
    """Return a message as the GPU driver writes it to the kernel's log. text: what follows the number."""
    return f"NVRM: Xid ({gpu}): {number}{text}"


def fault_of(host: str, gpu: str, number: int, text: str, age_s: float) -> GpuFault | None:
    """Return the fault that a message shows; None if it is handled, harmless, or a consequence of another error."""
    log = read_rank(host, xid_line(gpu, number, text))
    if log.evidence is None or not log.is_own_cause:
        return None
    return GpuFault(host, number, gpu, xid_of(number, text).meaning, age_s, log.evidence.verdict.action)


def worst_of(faults: Iterable[GpuFault]) -> GpuFault | None:
    """Return the fault of a host to report: faults that evict the host come first, and of these the earliest."""
    return min(
        faults,
        key=lambda fault: (fault.action is not FailureAction.EVICT_HOST, -fault.age_s, fault.number),
        default=None,
    )


def blame(
    report: HangReport, ranks: tuple[int, ...], host_of: Mapping[int, str], faults: Mapping[str, GpuFault]
) -> HangBlame:
    """Return who is at fault.

    ranks: the report's suspects of this round. host_of: the host of each rank of the round. faults: by host, those in
    the time of the hang.
    """
    hosts = _hosts(ranks, host_of)
    if not faults:
        return HangBlame(ranks, hosts, report.confidence)
    if report.is_firm and hosts:
        return _of_named(report, ranks, host_of, faults)
    candidates = _candidates(report, ranks, host_of)
    involved = [host for host in _hosts(candidates, host_of) if host in faults]
    if len(involved) == 1:
        (host,) = involved
        there = tuple(rank for rank in candidates if host_of[rank] == host)
        reasons = (f"of the hosts that may be at fault, only {faults[host].text}", *_elsewhere(faults, involved))
        return HangBlame(there if len(there) == 1 else (), (host,), Confidence.LIKELY, reasons)
    known = tuple(faults[host].text for host in involved[:_MAX_LISTED])
    return HangBlame(ranks, hosts, report.confidence, (*known, *_elsewhere(faults, involved)))


def _of_named(
    report: HangReport, ranks: tuple[int, ...], host_of: Mapping[int, str], faults: Mapping[str, GpuFault]
) -> HangBlame:
    hosts = _hosts(ranks, host_of)
    shared = [host for host in hosts if host in faults]
    causes = tuple(faults[host].text for host in shared[:_MAX_LISTED])
    if not shared:
        positions = f"the positions of the ranks point to {names_text(hosts)}"
        return HangBlame(ranks, hosts, report.confidence, _elsewhere(faults, (), f"; but {positions}"))
    elsewhere = _elsewhere(faults, shared)
    # a rank that is certain to hang stays named: two ranks can hang, and the kernel reports only one of the causes
    if report.confidence is not Confidence.CERTAIN and len(shared) == 1 < len(hosts):
        there = tuple(rank for rank in ranks if host_of.get(rank) == shared[0])
        return HangBlame(there, (shared[0],), Confidence.LIKELY, (*causes, *elsewhere))
    is_explained = len(shared) == len(hosts)
    confidence = Confidence.CERTAIN if is_explained else report.confidence
    return HangBlame(ranks, hosts, confidence, (*causes, *elsewhere))


def _candidates(report: HangReport, ranks: tuple[int, ...], host_of: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that may be at fault: those of a cycle, or in collectives that no rank holds up, or else all."""
    if ranks:
        return ranks
    inside = {rank for entry in report.missing if not entry.held_up_by for rank in entry.waiting}
    return tuple(sorted(inside & host_of.keys() or host_of))


def _elsewhere(faults: Mapping[str, GpuFault], involved: Iterable[str], ending: str = "") -> tuple[str, ...]:
    others = sorted(faults.keys() - set(involved))[:_MAX_LISTED]
    return tuple(f"{faults[host].text}{ending or '; it does not explain the hang'}" for host in others)


def _hosts(ranks: Iterable[int], host_of: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host_of[rank] for rank in sorted(ranks) if rank in host_of))

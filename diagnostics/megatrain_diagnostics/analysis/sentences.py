"""Writes findings as sentences; each sentence contains the figures that support it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.candidates import Candidates
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.network import HostEvidence, SlowNetwork
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.analysis.straggler_evidence import PictureWait
from megatrain_diagnostics.events.roster import Roster

_DOES = {
    Aspect.COMPUTE: "computes",
    Aspect.DATA: "waits for data",
    Aspect.GC: "collects garbage",
}
_MEANS = {
    Cause.LENGTHS: (
        "its compute time changes with its samples, such as the lengths of documents: they are the cause, not the host"
    ),
    Cause.GC: (
        "garbage collection: schedule it for all ranks at once (train.gc_interval); replacing the host does not help"
    ),
    Cause.DATA: "its data arrives late: check the storage and the data loader of that host",
}
_WAS_EXPLAINED = "a few steps ago its samples explained this: the host is slow only if it stays slow with other samples"
_NOT_BY_PAST = "with a single peer, high confidence needs earlier steps that show which of the two became slow"


def place_of(rank: int, roster: Roster) -> str:
    """Return "rank 5 (stage 0, dp 1, tp 0) on host-2"."""
    host = roster.host_of(rank) or "an unknown host"
    return f"rank {rank} ({roster.layout.place_text(rank)}) on {host}"


def rank_sentences(
    finding: Finding, slow: Candidates, roster: Roster, *, was_explained: bool, picture_wait: PictureWait | None
) -> Finding:
    """Return the finding with its evidence as sentences.

    was_explained, picture_wait: see the methods of StragglerEvidence.
    """
    worst = finding.ranks[0]
    peers = "its only peer" if finding.num_peers == 1 else f"its {finding.num_peers} peers"
    first = (
        f"{place_of(worst, roster)} {_DOES[slow.aspect]} {_ms(finding.excess_s)} a step longer than {peers}: "
        f"{100 * finding.excess:.0f} % of the stage's compute, score {finding.score:.1f}, "
        f"in {finding.num_seen} of {finding.num_steps} steps"
    )
    sentences = [first]
    if slow.agrees(worst):
        sentences.append(f"the others wait for it: it waits {_ms(finding.wait_deficit_s)} a step less than {peers}")
    else:
        sentences.append(
            f"the second signal does not agree: it waits only {_ms(max(0.0, finding.wait_deficit_s))} a step less "
            f"than {peers}"
        )
    sentences += _of_hosts(finding, roster)
    if picture_wait is not None:
        sentences.append(_picture_sentence(picture_wait))
    elif finding.cause in _MEANS:
        sentences.append(_MEANS[finding.cause])
    if was_explained:
        sentences.append(_WAS_EXPLAINED)
    if finding.confidence is VerdictConfidence.LOW and slow.agrees(worst) and finding.num_peers == 1:
        sentences.append(_NOT_BY_PAST)
    return replace(finding, evidence=tuple(sentences))


def _picture_sentence(wait: PictureWait) -> str:
    reads = f", {_ms(wait.read_s)} of reads in all" if wait.read_s else ""
    return (
        f"the reads of {wait.host} wait {_ms(wait.waited_s)} a step for producers of pictures{reads}: check the "
        "producers that the page of the host lists; the host itself is not slow"
    )


def _of_hosts(finding: Finding, roster: Roster) -> list[str]:
    sentences = []
    for host in finding.hosts:
        own = roster.ranks_on(host)
        slow = [rank for rank in finding.ranks if roster.host_of(rank) == host]
        if len(own) > 1:
            which = "all are" if len(slow) == len(own) else _are(slow)
            sentences.append(f"of the {len(own)} ranks of {host} {which} slow")
    return sentences


def _are(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown} is" if len(ranks) == 1 else f"ranks {shown} are"


def stage_sentences(finding: Finding, num_stages: int, has_risen: bool) -> Finding:
    """Return the finding of a slow stage with its evidence as sentences."""
    last = " (the last stage, which also computes the loss)" if finding.stage == num_stages - 1 else ""
    first = (
        f"stage {finding.stage}{last} computes {_ms(finding.excess_s)} a step longer than the other stages (medians of "
        f"their ranks): {100 * finding.excess:.0f} %, in {finding.num_seen} of {finding.num_steps} steps"
    )
    sentences = [first]
    if has_risen:
        hosts = ", ".join(finding.hosts) or "its hosts"
        sentences.append(f"the stage was not slow at first, and the partition has not changed: check {hosts}")
    else:
        hint = f"give stage {finding.stage} fewer layers and the others more with parallel.layers_per_chunk"
        sentences.append(f"the layers are partitioned unevenly in terms of time: {hint}")
    return replace(finding, evidence=tuple(sentences))


def rotating_sentence(cause: Cause, num_ranks: int, excess_s: float, scale: float, correlation: float) -> str:
    """Return the sentence about a slowness that moves to another rank each step."""
    share = f"{_ms(excess_s)} a step, {100 * excess_s / scale:.0f} % of a stage's compute, in turn on {num_ranks} ranks"
    if cause is Cause.GC:
        return (
            f"ranks collect garbage at different times: {share}; schedule it for all ranks at once (train.gc_interval)"
        )
    return (
        f"the slowest rank changes from step to step: {share}; compute time follows the samples (Pearson "
        f"{correlation:.2f})"
    )


def network_sentences(network: SlowNetwork) -> tuple[str, ...]:
    """Return the evidence of a slow network as sentences."""
    if network.kind == "waiting":
        waiting = f"{len(network.ranks)} ranks wait {_ms(network.excess_s)} longer for communication"
        return (
            f"steps take {_ms(network.now_s)}; at first they took {_ms(network.before_s)}",
            f"no rank computes, loads or collects longer: {waiting}",
        )
    against = " and ".join(
        text
        for text, holds in (("at first", network.is_against_past), ("in similar groups", network.is_against_peers))
        if holds
    )
    now = f"{network.kind} transfers take {_ms(network.now_s)} a step once all have arrived"
    sentences = [f"{now}, but {_ms(network.before_s)} {against}"]
    return (*sentences, _which_host(network))


def _which_host(network: SlowNetwork) -> str:
    if network.host_evidence is HostEvidence.WITHIN_HOST:
        return "each slow group lies on a single host"
    if len(network.hosts) > 1:
        return f"the slow groups do not show which of these {len(network.hosts)} hosts is slow"
    named = f"all slow groups include {network.hosts[0]}"
    if network.host_evidence is HostEvidence.ONLY_SLOW:
        return f"{named}, and no other group does"
    return f"{named}, but so do groups that are not slow"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1e3 * seconds:.1f} ms"


def findings_headline(findings: Sequence[Finding], *, is_enough: bool) -> str:
    """Return the findings as one sentence. `is_enough`: enough steps were compared, so an empty result means that no
    rank is slow."""
    if findings:
        worst = findings[0]
        where = ", ".join(worst.hosts) or "no single host"
        more = f"; {len(findings) - 1} more below" if len(findings) > 1 else ""
        return f"slow because of its {worst.cause.value}: {where}, {worst.confidence.value} confidence{more}"
    if not is_enough:
        return "insufficient evidence: too few steps, or ranks without peers"
    return "no rank is slower than its peers"

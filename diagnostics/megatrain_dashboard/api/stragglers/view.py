"""Makes the document of /stragglers: the stragglers of a job, from the daemon's state or computed from events."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain_dashboard.api.stragglers.document import FindingDocument, HostScore, StragglersDocument
from megatrain_dashboard.responses.document import thresholds_document
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.sentences import findings_headline
from megatrain_diagnostics.analysis.straggler_history import StragglerHistory
from megatrain_diagnostics.store.daemon_state import DaemonState

_MAX_SCORES = 100
_MAX_FINDINGS = 100
_MAX_RANKS = 4096
"""Limit of the ranks of one finding. One of three stages of a job of 12,288 ranks has this number of ranks."""


def stragglers_of_daemon(state: DaemonState) -> StragglersDocument:
    """Return the findings of the running daemon for the newest steps."""
    findings = state.findings
    return StragglersDocument(
        round=state.round,
        source="daemon",
        is_enough=state.is_enough,
        headline=findings_headline(findings, is_enough=state.is_enough),
        first_step=state.first_step,
        last_step=state.last_step,
        num_steps=state.num_steps,
        findings=tuple(_finding(finding, is_over=False) for finding in findings[:_MAX_FINDINGS]),
        scores=_scores(state.host_scores),
        thresholds=thresholds_document(state.thresholds),
        silent_ranks=state.silent_ranks,
        ranks_without_peers=state.ranks_without_peers,
    )


def stragglers_of_events(round_number: int, found: StragglerHistory) -> StragglersDocument:
    """Return the findings that live detection would have made on stored steps, including those that have ended."""
    end = found.assessment
    return StragglersDocument(
        round=round_number,
        source="events",
        is_enough=end.is_enough,
        headline=findings_headline(found.findings, is_enough=end.is_enough),
        first_step=end.first_step,
        last_step=end.last_step,
        num_steps=found.num_compared,
        findings=tuple(
            _finding(finding, is_over=finding.key in found.ended) for finding in found.findings[:_MAX_FINDINGS]
        ),
        scores=_scores(end.host_scores),
        thresholds=thresholds_document(end.thresholds),
        silent_ranks=end.silent_ranks,
        ranks_without_peers=end.ranks_without_peers,
    )


def _scores(by_host: Mapping[str, float]) -> tuple[HostScore, ...]:
    ordered = sorted(by_host.items(), key=lambda item: (-item[1], item[0]))[:_MAX_SCORES]
    return tuple(HostScore(host=host, score=score) for host, score in ordered)


def _finding(finding: Finding, *, is_over: bool) -> FindingDocument:
    return FindingDocument(
        cause=str(finding.cause),
        is_of_host=finding.cause.is_of_host,
        confidence=str(finding.confidence),
        hosts=finding.hosts,
        ranks=finding.ranks[:_MAX_RANKS],
        stage=finding.stage,
        first_step=finding.first_step,
        last_step=finding.last_step,
        num_seen=finding.num_seen,
        num_steps=finding.num_steps,
        is_over=is_over,
        excess=finding.excess,
        excess_s=finding.excess_s,
        score=finding.score,
        gain_s=finding.gain_s,
        step_s=finding.step_s,
        num_victims=finding.num_victims,
        evidence=finding.evidence,
    )

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
    return StragglersDocument.of(
        state,
        source="daemon",
        headline=findings_headline(findings, is_enough=state.is_enough),
        findings=tuple(_finding(finding, is_over=False) for finding in findings[:_MAX_FINDINGS]),
        scores=_scores(state.host_scores),
        thresholds=thresholds_document(state.thresholds),
    )


def stragglers_of_events(round_number: int, found: StragglerHistory) -> StragglersDocument:
    """Return the findings that live detection would have made on stored steps, including those that have ended."""
    end = found.assessment
    return StragglersDocument.of(
        end,
        round=round_number,
        source="events",
        headline=findings_headline(found.findings, is_enough=end.is_enough),
        num_steps=found.num_compared,
        findings=tuple(
            _finding(finding, is_over=finding.key in found.ended) for finding in found.findings[:_MAX_FINDINGS]
        ),
        scores=_scores(end.host_scores),
        thresholds=thresholds_document(end.thresholds),
    )


def _scores(by_host: Mapping[str, float]) -> tuple[HostScore, ...]:
    ordered = sorted(by_host.items(), key=lambda item: (-item[1], item[0]))[:_MAX_SCORES]
    return tuple(HostScore(host=host, score=score) for host, score in ordered)


def _finding(finding: Finding, *, is_over: bool) -> FindingDocument:
    ranks = finding.ranks[:_MAX_RANKS]
    return FindingDocument.of(finding, is_of_host=finding.cause.is_of_host, ranks=ranks, is_over=is_over)

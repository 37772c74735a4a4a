"""The culprit of a broken round: one answer for every subcommand, view and record. Pure functions.

When the workers of a round are gone, the driver judges and writes the culprit into the incident. From then on the
incident is the answer, even if the driver found no culprit. Before that, and without a driver, the same rules judge the
available evidence: exit codes of workers, positions of ranks (`hang`), logs (`bundle`). A failure that follows from the
culprit's failure is shown as a consequence, not as a cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.formatting import names_text, ranks_text
from megatrain_job.failures.verdict import label_row

if TYPE_CHECKING:  # the rules for logs take long to load, and a caller that judges only exit codes does not need them
    from megatrain_job.failures.bundle import BundleVerdict
    from megatrain_job.failures.hang import HangReport

_BREAKS = (IncidentKind.FAILURE, IncidentKind.HANG, IncidentKind.HOST_LOST)
"""Kinds of incidents in which a round broke; in the other kinds the round was ended on purpose."""

HostOf = Callable[[int], str]
"""rank -> host, "" if unknown."""


class FailureRole(StrEnum):
    """The relation of a rank's failure to the failure of the round."""

    ROOT = "root"
    """The failure began here."""
    CAUSE = "cause"
    """The rank also failed by itself."""
    FOLLOWS = "follows"
    """The rank failed because other ranks had failed."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The culprit of a round, and the source of that judgment. Empty `ranks` and `hosts`: no culprit is known."""

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    reason: str = ""
    confidence: str = ""
    label: str = ""
    action: str = ""
    """The action of the driver; empty if the driver has not judged."""
    incident: str = ""
    """Id of the incident that names the culprit; empty if none does."""
    kind: IncidentKind | None = None

    @property
    def is_named(self) -> bool:
        return bool(self.ranks or self.hosts)

    @property
    def text(self) -> str:
        """Return "rank 3 on host-4", without unknown parts; empty without a culprit."""
        hosts = names_text(self.hosts, most=4)
        ranks = ranks_text(self.ranks)
        return f"{ranks} on {hosts}" if hosts and ranks else hosts or ranks

    def blames(self, rank: int, host: str) -> bool:
        """Return whether a rank is to blame: by itself, or with its host if no rank is named."""
        return rank in self.ranks if self.ranks else host in self.hosts

    def role(self, rank: int, host: str, label: str, *, is_victim: bool) -> FailureRole:
        """Return a failure's role. is_victim: its log or exit code shows that another failure caused it."""
        if self.is_named and self.blames(rank, host):
            return FailureRole.ROOT
        row = label_row(label)
        is_loss = self.is_named and row.is_sign_of_loss and (row.is_failure or self.kind is not IncidentKind.FAILURE)
        return FailureRole.FOLLOWS if is_victim or is_loss else FailureRole.CAUSE

    def role_of(self, failure: RankFailure, host: str) -> FailureRole:
        """Return the role of a worker's failure in the failure of the round."""
        return self.role(failure.rank, host, failure.label, is_victim=is_victim(failure))


NO_CULPRIT: Final = Culprit()


def is_victim(failure: RankFailure) -> bool:
    """Return whether a worker ended because other workers had ended, according to its log or exit code."""
    return failure.is_cascade or failure.exit_code == ExitCode.COMMUNICATION


def root_of(failures: Iterable[RankFailure]) -> RankFailure | None:
    """Return the earliest failure of a worker that is not a victim; None if all are victims."""
    roots = (failure for failure in failures if not is_victim(failure))
    return min(roots, key=lambda failure: (failure.at_unix_s, failure.rank), default=None)


def first_of(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure to report: the root, else the earliest failure of a victim; None if there is none."""
    return root_of(failures) or min(failures, key=lambda failure: (failure.at_unix_s, failure.rank), default=None)


def is_break(incident: Incident) -> bool:
    """Return whether an incident's round broke. If it was ended on purpose, its logs do not show the reason."""
    return incident.kind in _BREAKS


def recorded_culprit(incidents: Iterable[Incident], round_number: int) -> Culprit | None:
    """Return the culprit of the newest incident of a round; None if no incident reports that the round broke.

    For an incident that is not judged yet, the culprit follows from its failures; None if they do not show one.
    """
    of_round = [incident for incident in incidents if incident.round == round_number and is_break(incident)]
    return culprit_of_incident(max(of_round, key=lambda incident: incident.incident_id)) if of_round else None


def culprit_of_incident(incident: Incident) -> Culprit | None:
    """Return the culprit of an incident; None if it is not judged yet and its failures do not show one."""
    ranks, hosts, label = incident.culprit_ranks, incident.culprit_hosts, incident.label
    if not ranks and not hosts and incident.moments.halted is None:
        root = root_of(incident.failures)
        if root is None:
            return None
        ranks, label = (root.rank,), root.label
    return Culprit(
        ranks=ranks,
        hosts=hosts,
        reason=incident.reason,
        confidence=incident.confidence,
        label=label,
        action=incident.action,
        incident=incident.incident_id,
        kind=incident.kind,
    )


def failures_by_role(incident: Incident, hosts: Mapping[int, str]) -> list[tuple[FailureRole, RankFailure]]:
    """Return the failures in an incident with their roles, the root first and victims last. hosts: by rank."""
    culprit = culprit_of_incident(incident) or NO_CULPRIT
    found = [(culprit.role_of(failure, hosts.get(failure.rank, "")), failure) for failure in incident.failures]
    order = list(FailureRole)
    return sorted(found, key=lambda pair: (order.index(pair[0]), pair[1].at_unix_s, pair[1].rank))


def culprit_of_positions(report: HangReport, host_of: HostOf) -> Culprit:
    """Return the culprit according to the positions of the ranks; without ranks if the positions are not conclusive."""
    ranks = report.suspects if report.is_firm else ()
    return Culprit(ranks, _hosts(ranks, host_of), report.reason, str(report.confidence), "hang")


def culprit_of_logs(bundle: BundleVerdict, host_of: HostOf) -> Culprit:
    """Return the culprit according to the logs of all ranks."""
    ranks = (int(bundle.root_rank),) if bundle.root_rank is not None and bundle.root_rank.isdecimal() else ()
    return Culprit(ranks, _hosts(ranks, host_of), bundle.reason, label=str(bundle.verdict.label))


def _hosts(ranks: Iterable[int], host_of: HostOf) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for rank in ranks if (host := host_of(rank))))

"""Judges the logs of several ranks of one job: one verdict, and the rank where the failure began.

A cause in a rank's own log decides. If all ranks only waited, the failure began at the rank that sequence numbers,
messages of other ranks, or its own empty log point to (MegaScale sec. 5: the rank that hangs logs nothing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from megatrain_job.failures.classifier import LogClassifier
from megatrain_job.failures.context_lines import WatchdogSequences
from megatrain_job.failures.lines import host_of_line
from megatrain_job.failures.rule import ABORT, LINK, NOISE, TIMEOUT, Evidence
from megatrain_job.failures.verdict import LABELS, NO_FAILURE, LabelRow, Verdict

OWN_CAUSE: Final = TIMEOUT + 1
"""The lowest weight of a line about a failure of the rank that wrote it. Waiting and a lost peer weigh less."""
_DAY_S: Final = 86400.0


@dataclass(frozen=True, slots=True)
class RankLog:
    """The findings in one rank's log."""

    rank: str
    evidence: Evidence | None
    sequences: WatchdogSequences
    addresses: frozenset[str]
    """Hosts that the log's lines name as their writer."""

    @property
    def weight(self) -> int:
        """The weight of the log's verdict; 0 for a log without a failure."""
        if self.evidence is None or not LABELS[self.evidence.label].is_failure:
            return 0
        return self.evidence.weight

    @property
    def row(self) -> LabelRow | None:
        """The row of the log's label; None for a log without a sign of failure."""
        return None if self.evidence is None else LABELS[self.evidence.label]

    @property
    def is_own_cause(self) -> bool:
        """Whether the log names a cause at this rank."""
        return self.evidence is not None and self.weight >= OWN_CAUSE and not self.evidence.rule.is_cascade


@dataclass(frozen=True, slots=True)
class BundleVerdict:
    """The verdict on a job, the rank where the failure began, and the reason."""

    verdict: Verdict
    root_rank: str | None
    reason: str


def read_rank(rank: str, tail: str | bytes) -> RankLog:
    """Read one rank's log."""
    classifier = LogClassifier()
    classifier.feed(tail)
    classifier.finish()
    head = tail[:65536]
    text = head if isinstance(head, str) else head.decode("utf-8", "replace")
    hosts = {host_of_line(line) for line in text.splitlines()[:200]}
    return RankLog(rank, classifier.best, classifier.sequences, frozenset(host for host in hosts if host))


def classify_bundle(tails: Mapping[str, str | bytes]) -> BundleVerdict:
    """Return the verdict on the logs of a job's ranks, by rank."""
    return judge([read_rank(rank, tails[rank]) for rank in sorted(tails, key=_order)])


def judge(logs: list[RankLog]) -> BundleVerdict:
    """Return the verdict on the ranks' logs. logs: in order of rank."""
    failed = [log for log in logs if log.weight > NOISE]
    if not failed:
        benign = [log.evidence.verdict for log in logs if log.evidence is not None]
        return BundleVerdict(benign[0] if benign else NO_FAILURE, None, "no log contains a failure")
    owners = [log for log in logs if log.is_own_cause]
    # a rank that died breaks the paths of its peers, so messages about paths are not a cause
    causes = [log for log in owners if log.weight != LINK]
    if causes:
        named = _named_by_others(_heaviest(causes))
        if named is not None:
            return _of(named, logs, "the other ranks with an equally strong cause name it")
        return _of(_first(causes), logs, _why_first(causes))
    ended = [log for log in failed if _has_ended(log)]
    if len(ended) == 1 and len(failed) > 1:
        return _of(ended[0], logs, "its process ended by itself; the others lost it or waited")
    if owners:
        return _of_paths(_with_gaps(logs), owners)
    return _of_waiting(_with_gaps(logs), failed)


def _of_paths(logs: list[RankLog], owners: list[RankLog]) -> BundleVerdict:
    """Return the verdict if logs name broken paths: the rank that the paths have in common is the root."""
    if len(owners) > 1:
        named = _named_by_others(logs)
        if named is not None:
            return _of(named, logs, "the paths that the others name lead to it")
        silent = [log for log in logs if log.weight <= NOISE]
        peers = {(log.evidence.culprit or "").rpartition("peer ")[2] for log in owners if log.evidence is not None}
        is_one_end = len(peers) == 1 and "" not in peers
        if len(silent) == 1 and (is_one_end or len(owners) == len(logs) - 1):
            return _of(
                silent[0],
                [*owners, silent[0]],
                "the broken paths that the others name lead to it, and it logged nothing",
            )
    return _of(_first(owners), logs, "its log names a broken path")


def _of_waiting(logs: list[RankLog], failed: list[RankLog]) -> BundleVerdict:
    """Return the verdict if no log names an independent cause."""
    behind = _behind(logs)
    if behind is not None:
        return _of(behind, logs, "its last collective is behind the others'")
    silent = [log for log in logs if log.weight <= NOISE]
    if len(silent) == 1:
        return _of(silent[0], logs, "the others waited for it or lost it, and it logged nothing")
    named = _named_by_others(logs)
    if named is not None:
        return _of(named, logs, "the other ranks name it")
    others = [log for log in failed if log.row is not None and not log.row.is_wait]
    if others and len(others) < len(failed):
        return _of(_first(others), logs, "the others only waited")
    if silent and len(silent) < len(logs) / 2:
        return _of(silent[0], logs, "it is the first of the ranks that logged nothing")
    return _of(_first([log for log in failed if not _is_cascade(log)] or failed), logs, "its failure is the strongest")


def _with_gaps(logs: list[RankLog]) -> list[RankLog]:
    """Return the logs, with an empty log for each missing rank below the highest one.

    The logs are returned unchanged if a name is not a number, or if more than half of the ranks are missing.
    """
    known = {int(log.rank): log for log in logs if log.rank.isdecimal()}
    if len(known) < len(logs) or not known or max(known) >= 2 * len(known):
        return logs
    return [
        known.get(rank) or RankLog(str(rank), None, WatchdogSequences(), frozenset()) for rank in range(max(known) + 1)
    ]


def _has_ended(log: RankLog) -> bool:
    """Return whether a log shows that the rank's process ended by itself: out of host memory, a crash, an error."""
    return log.row is not None and log.row.ends_its_rank and not _is_cascade(log) and log.weight <= ABORT


def _of(root: RankLog, logs: list[RankLog], reason: str) -> BundleVerdict:
    """Return the verdict on the logs of a job whose failure began at `root`.

    It is the verdict of the root's log if that log names a cause of its own. Otherwise the culprit is the root, and the
    label is that of the root's log. If that log shows no failure, the label is the most frequent one of the other logs;
    labels of waits take precedence.
    """
    if root.evidence is not None and root.weight > NOISE:
        verdict = root.evidence.verdict
        if root.is_own_cause or len(logs) == 1:
            return BundleVerdict(replace(verdict, culprit=verdict.culprit or f"rank {root.rank}"), root.rank, reason)
    votes = Counter(log.evidence.label for log in logs if log.evidence is not None and log.weight > NOISE)
    waits = [label for label, _ in votes.most_common() if LABELS[label].is_wait]
    label = waits[0] if waits else votes.most_common(1)[0][0]
    if root.evidence is not None and root.weight > NOISE:
        label = root.evidence.label
    heaviest = _first([log for log in logs if log.evidence is not None and log.evidence.label is label])
    assert heaviest.evidence is not None
    verdict = heaviest.evidence.verdict
    return BundleVerdict(
        replace(verdict, action=LABELS[label].action if root is not heaviest else verdict.action, is_cascade=False,
                culprit=f"rank {root.rank}"),
        root.rank, reason,
    )  # fmt: skip


def _is_cascade(log: RankLog) -> bool:
    return log.evidence is not None and log.evidence.rule.is_cascade


def _first(logs: list[RankLog]) -> RankLog:
    """Return the heaviest log; of several, the one with the earliest line, or the first one if no line has a time."""
    heaviest = _heaviest(logs)
    timed = _timed(heaviest)
    if not timed:
        return heaviest[0]
    # times of day: if they are far apart, midnight passed between them
    latest_s = max(time_s for time_s, _ in timed)
    return min(timed, key=lambda pair: pair[0] + (_DAY_S if pair[0] < latest_s - _DAY_S / 2 else 0.0))[1]


def _timed(logs: list[RankLog]) -> list[tuple[float, RankLog]]:
    """Return the logs whose deciding line has a time, with this time."""
    return [(log.evidence.time_s, log) for log in logs if log.evidence is not None and log.evidence.time_s is not None]


def _why_first(causes: list[RankLog]) -> str:
    """Return why `_first` chooses one of several logs with a cause."""
    heaviest = _heaviest(causes)
    if len(heaviest) == 1:
        return "its log names the strongest cause"
    if _timed(heaviest):
        return "of the equally strong causes whose lines have a time, its log names the earliest"
    return "its log names one of the equally strong causes, whose lines have no times"


def _heaviest(logs: list[RankLog]) -> list[RankLog]:
    most = max(log.weight for log in logs)
    return [log for log in logs if log.weight == most]


def _behind(logs: list[RankLog]) -> RankLog | None:
    """Return the one rank whose newest collective in a group has the lowest number; None if there is no such rank."""
    for table in ("enqueued", "timed_out"):
        by_group: dict[str, list[tuple[int, RankLog]]] = {}
        for log in logs:
            for group, number in getattr(log.sequences, table).items():
                by_group.setdefault(group, []).append((number, log))
        for numbers in by_group.values():
            numbers.sort(key=lambda pair: pair[0])
            if len(numbers) > 1 and numbers[0][0] < numbers[1][0]:
                return numbers[0][1]
    return None


def _named_by_others(logs: list[RankLog]) -> RankLog | None:
    """Return the rank that the most other logs name, by rank or by host; None if none is named, or there is a tie."""
    by_rank = {log.rank: index for index, log in enumerate(logs)}
    by_address: dict[str, list[int]] = {}
    for index, log in enumerate(logs):
        for address in log.addresses:
            by_address.setdefault(address, []).append(index)
    votes: Counter[str] = Counter()
    for index, log in enumerate(logs):
        parts = (log.evidence.culprit or "").split() if log.evidence is not None else []
        names = dict(zip(parts[::2], parts[1::2], strict=False)) if len(parts) % 2 == 0 else {}
        named = set(by_address.get((names.get("peer") or "").split(":")[0], ()))
        if names.get("rank") in by_rank:
            named.add(by_rank[names["rank"]])
        votes.update(logs[other].rank for other in sorted(named - {index}))
    best = votes.most_common(2)
    if not best or (len(best) > 1 and best[0][1] == best[1][1]):
        return None
    return next(log for log in logs if log.rank == best[0][0])


def _order(rank: str) -> tuple[int, str]:
    return (int(rank) if rank.isdecimal() else 1 << 60, rank)

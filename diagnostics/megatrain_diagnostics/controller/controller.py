"""The live diagnosis of a running job: analyzes committed rows and writes verdicts to etcd. Training never waits.

Only the newest round is analyzed; all state is dropped when a new round begins. While etcd is unavailable, up to 50
verdicts wait. A restarted daemon reads the verdicts of the earlier daemon.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.errors import CoordinationError, DataError
from megatrain.contracts.records.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.formatting import count_text, ranks_text
from megatrain_diagnostics.analysis.findings import Finding, StragglerAssessment, thresholds_of
from megatrain_diagnostics.analysis.live import LiveDetection
from megatrain_diagnostics.analysis.numerics import NumericsAlarm, NumericsWatch
from megatrain_diagnostics.analysis.step_ring import LAST_STEP
from megatrain_diagnostics.controller.etcd_records import FullSpans, VerdictLog
from megatrain_diagnostics.controller.roster_builder import RosterBuilder
from megatrain_diagnostics.controller.span_window import SpanWindow
from megatrain_diagnostics.controller.verdict_rules import VerdictAuthor, WrittenVerdicts, verdicts_to_write
from megatrain_diagnostics.events.tables import Clocks, Groups, Ranks, Spans, StepTotals, Table, Values, select
from megatrain_job.coordination.client import EtcdClient

_logger = logging.getLogger(__name__)
_MAX_WAITING = 50
_WARNING_PAUSE_S = 60.0
_AGAIN_S = 5.0
"""Pause after a failed request to etcd: each blocks until its deadline, which delays the analysis of rows."""
STEP_DEADLINE_S = 30.0
"""After this time a step is analyzed without the ranks that have not reported it."""
_LONGEST_TICK_S = 600.0
_TICK_S = 1.0
"""The time that is assumed to have passed between two ticks if the clock was set in between."""


class Controller:
    """A consumer of committed rows. Any thread may read the results (`assessment`, `step`, `silent_ranks`).

    `section` returns the current [diagnostics]; thresholds are read at the beginning of a round. `with_devices` takes a
    finding and its round, and returns the finding with evidence from the devices of its ranks.
    """

    def __init__(
        self,
        client: EtcdClient,
        job: str,
        session: str,
        section: Callable[[], DiagnosticsConfig],
        now_s: float,
        with_devices: Callable[[Finding, int], Finding] = lambda finding, round_number: finding,
    ) -> None:
        keys = JobKeys(job)
        self._section = section
        self._session, self._finding_with_devices = session, with_devices
        self._assessment = StragglerAssessment()
        self._log = VerdictLog(client, keys)
        self._full_spans = FullSpans(client, keys, session, lambda: section().sample_period)
        self._rosters = RosterBuilder()
        self._live: LiveDetection | None = None
        self._numerics = NumericsWatch(section().loss_jump_factor)
        self._spans = SpanWindow()
        self._alarms: list[NumericsAlarm] = []
        self._written: WrittenVerdicts | None = None
        self._waiting: deque[HostVerdict] = deque(maxlen=_MAX_WAITING)
        self._num_written = 0
        self._unix_s = now_s
        self._steady_s = 0.0
        """Time since the start; setting the machine's clock does not affect it much."""
        self._next_warning_s = self._next_write_s = float("-inf")

    @property
    def round(self) -> int:
        """The newest round that ranks reported; -1: none."""
        return self._rosters.newest

    @property
    def assessment(self) -> StragglerAssessment:
        """The current assessment."""
        return self._assessment

    @property
    def step(self) -> int | None:
        """The newest compared step."""
        return None if self._live is None else self._live.step

    @property
    def farthest_step(self) -> int:
        """The last step that a rank can have reached; a rank that reports a later step is wrong."""
        live = self._live
        return LAST_STEP if live is None else live.farthest_step

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks that send nothing while others report steps."""
        return () if self._live is None else self._live.silent_ranks()

    def consume(self, table: Table) -> None:
        """Receive rows that are on disk."""
        if isinstance(table, Ranks | Groups):
            if self._rosters.add(table):
                self._begin_round()
            elif isinstance(table, Ranks):
                self._take_hosts()
        elif isinstance(table, StepTotals) and self._live is not None:
            self._live.add_totals(self._rosters.of_newest(table), self._steady_s)
        elif isinstance(table, Values):
            values = self._rosters.of_newest(table)
            values = select(values, values.step <= self.farthest_step)
            if self._live is not None:
                self._live.add_values(values)
            self._alarms += self._numerics.add(values)
        elif isinstance(table, Clocks):
            self._spans.add_clocks(table)
        elif isinstance(table, Spans):
            self._spans.add(self._rosters.of_newest(table))

    def tick(self, now_s: float) -> None:
        """Analyze the completed steps, and write verdicts. Units: unix seconds."""
        passed_s, self._unix_s = now_s - self._unix_s, now_s
        self._steady_s += passed_s if 0.0 <= passed_s <= _LONGEST_TICK_S else _TICK_S
        live = self._live
        try:
            if live is not None:
                live.correlations = self._spans.correlations(live.peers.num_ranks)
                # one step at a time: a verdict must not include later rows of the same batch
                while live.advance(self._steady_s, at_most=1):
                    self._assessment = self._with_devices(live.assessment)
                    self._decide(now_s, self._assessment.findings)
                self._warn_of_silence(live)
            self._decide(now_s, self.assessment.findings)
            self._write(now_s)
        except CoordinationError as error:
            self._next_write_s = self._steady_s + _AGAIN_S
            waits = "waits" if len(self._waiting) == 1 else "wait"
            self._warn(f"{error}; {count_text(len(self._waiting), 'verdict')} {waits} to be written to etcd")

    def _begin_round(self) -> None:
        """Drop the state of the previous round, and start the analyses of the new one."""
        self._assessment = StragglerAssessment()
        try:
            roster = self._rosters.roster()
        except DataError as error:
            _logger.warning("round %d cannot be analyzed: %s", self._rosters.newest, error)
            self._live = None
            return
        self._live = LiveDetection(roster, thresholds_of(self._section()), STEP_DEADLINE_S)
        self._numerics = NumericsWatch(self._section().loss_jump_factor, roster.layout.world_size)
        self._spans = SpanWindow()
        self._alarms = []

    def _take_hosts(self) -> None:
        try:
            roster = self._rosters.roster()
        except DataError as error:
            self._warn(str(error))
            return
        if self._live is None or roster.layout != self._live.roster.layout:
            self._begin_round()  # the first rank reported another layout than most ranks
        elif roster.hosts != self._live.roster.hosts:
            self._live.set_roster(roster)

    def _decide(self, now_s: float, findings: tuple[Finding, ...]) -> None:
        """Queue verdicts for new findings and alarms. Raises: CoordinationError if written verdicts are unreadable."""
        number = self._rosters.newest
        if number < 0 or not (findings or self._alarms):
            return
        if self._written is None:
            if self._steady_s < self._next_write_s:
                return
            self._written = self._log.written(number)
        self._written = self._written.for_round(number)
        author = VerdictAuthor(self._session, self._section().straggler_steps, self._num_written)
        alarms, self._alarms = self._alarms, []
        for key, verdict in verdicts_to_write(
            now_s, self._weighed(findings, self._written), alarms, self._written, author
        ):
            self._written = self._written.with_verdict(key, verdict)
            self._num_written += 1
            self._waiting.append(verdict)

    def _write(self, now_s: float) -> None:
        """Write the queued verdicts. Raises: CoordinationError if etcd is unavailable; unwritten verdicts are kept."""
        if self._steady_s < self._next_write_s:
            return
        while self._waiting:
            self._log.write(self._waiting[0])
            verdict = self._waiting.popleft()
            about = verdict.kind.value if verdict.kind is VerdictKind.NUMERICS else verdict.cause.value
            _logger.warning(
                "verdict %s: %s, %s confidence: %s",
                *(verdict.verdict_id, about, verdict.confidence.value, "; ".join(verdict.evidence)),
            )
        findings = self.assessment.findings
        if findings:
            reason = f"suspicion: {findings[0].cause.value} ({', '.join(findings[0].hosts)})"
            self._full_spans.ask(now_s, self._steady_s, reason)

    def _with_devices(self, known: StragglerAssessment) -> StragglerAssessment:
        findings = tuple(self._finding_with_devices(finding, self._rosters.newest) for finding in known.findings)
        return replace(known, findings=findings) if findings else known

    def _weighed(self, findings: tuple[Finding, ...], written: WrittenVerdicts) -> list[Finding]:
        """Return the findings. For slow compute, the gain from a what-if replay is used if it is smaller."""
        found = []
        for finding in findings:
            is_new = (
                finding.confidence is VerdictConfidence.HIGH and (finding.key, finding.confidence) not in written.keys
            )
            if is_new and finding.cause is Cause.COMPUTE and self._live is not None:
                gain_s = self._spans.gain_without(finding.ranks, finding.first_step, self._live.roster)
                if gain_s is not None and gain_s < finding.gain_s:
                    sentence = f"what-if: without this slowness a step would be {1e3 * gain_s:.1f} ms shorter"
                    finding = replace(finding, gain_s=gain_s, evidence=(*finding.evidence, sentence))
            found.append(finding)
        return found

    def _warn_of_silence(self, live: LiveDetection) -> None:
        silent = live.silent_ranks()
        if silent:
            self._warn(f"{ranks_text(silent)} sent no telemetry for the newest steps")

    def _warn(self, text: str) -> None:
        """Log a warning at most once a minute."""
        if self._steady_s >= self._next_warning_s:
            self._next_warning_s = self._steady_s + _WARNING_PAUSE_S
            _logger.warning("%s", text)

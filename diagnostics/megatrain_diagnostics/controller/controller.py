"""The judge of a running job: fed with committed rows, writes verdicts to etcd. Training never waits for it.

Only the newest round counts; of a job that began anew everything that was known is dropped. While etcd is away
verdicts wait, a few of them; a restarted daemon reads the verdicts of the one before it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.errors import CoordinationError, DataError
from megatrain.contracts.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind
from megatrain.contracts.job_keys import JobKeys
from megatrain.coordination.client import EtcdClient
from megatrain_diagnostics.analysis.findings import Assessment, Finding, thresholds_of
from megatrain_diagnostics.analysis.live import LiveDetection
from megatrain_diagnostics.analysis.numerics import NumericsAlarm, NumericsWatch
from megatrain_diagnostics.analysis.step_ring import LAST_STEP
from megatrain_diagnostics.controller.full_spans import FullSpans
from megatrain_diagnostics.controller.roster_book import RosterBook
from megatrain_diagnostics.controller.span_window import SpanWindow
from megatrain_diagnostics.controller.verdict_log import VerdictLog
from megatrain_diagnostics.controller.verdict_rules import Told, Writer, judge
from megatrain_diagnostics.events.tables import Clocks, Groups, Ranks, Spans, StepTotals, Table, Values, select

_logger = logging.getLogger(__name__)
_MAX_WAITING = 50
_COMPLAINT_S = 60.0
_AGAIN_S = 5.0
"""After a failure: etcd is asked until a deadline, and rows must not wait for that."""
STEP_DEADLINE_S = 30.0
"""A step is judged without the ranks of which nothing came for so long."""
_LONGEST_TICK_S = 600.0
_TICK_S = 1.0
"""What a tick is taken to be whose clock was set."""


class Controller:
    """A consumer of committed rows. What it knows (`assessment`, `step`, `silent_ranks`) any thread may ask for.

    `section` returns [diagnostics] as it is now; thresholds are those at the beginning of a round. `beside` returns a
    finding of a round with what else is known of its ranks.
    """

    def __init__(
        self,
        client: EtcdClient,
        job: str,
        session: str,
        section: Callable[[], DiagnosticsConfig],
        now_s: float,
        beside: Callable[[Finding, int], Finding] = lambda finding, round_number: finding,
    ) -> None:
        keys = JobKeys(job)
        self._section = section
        self._session, self._beside = session, beside
        self._assessment = Assessment()
        self._log = VerdictLog(client, keys)
        self._full_spans = FullSpans(client, keys, session, lambda: section().sample_period)
        self._book = RosterBook()
        self._live: LiveDetection | None = None
        self._numerics = NumericsWatch(section().loss_jump_factor)
        self._spans = SpanWindow()
        self._alarms: list[NumericsAlarm] = []
        self._told: Told | None = None
        self._waiting: deque[HostVerdict] = deque(maxlen=_MAX_WAITING)
        self._num_written = 0
        self._unix_s = now_s
        self._steady_s = 0.0
        """What has passed since the beginning: it goes on, also when the machine's clock is set by an hour."""
        self._next_complaint_s = self._next_write_s = float("-inf")

    @property
    def round(self) -> int:
        """The newest that ranks reported; -1: none."""
        return self._book.newest

    @property
    def assessment(self) -> Assessment:
        """What is known now."""
        return self._assessment

    @property
    def step(self) -> int | None:
        """The newest step that was compared."""
        return None if self._live is None else self._live.step

    @property
    def farthest_step(self) -> int:
        """The last step that a rank may tell of now; what is beyond is nonsense of that rank."""
        live = self._live
        return LAST_STEP if live is None else live.farthest_step

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks of which nothing comes although others' steps do."""
        return () if self._live is None else self._live.silent_ranks()

    def consume(self, kind: type[Table], table: Table) -> None:
        """Take rows that are on disk."""
        if isinstance(table, Ranks | Groups):
            if self._book.add(table):
                self._begin_round()
            elif isinstance(table, Ranks):
                self._take_hosts()
        elif isinstance(table, StepTotals) and self._live is not None:
            self._live.add_totals(self._book.of_newest(table), self._steady_s)
        elif isinstance(table, Values):
            values = self._book.of_newest(table)
            values = select(values, values.step <= self.farthest_step)
            if self._live is not None:
                self._live.add_values(values)
            self._alarms += self._numerics.add(values)
        elif isinstance(table, Clocks):
            self._spans.add_clocks(table)
        elif isinstance(table, Spans):
            self._spans.add(self._book.of_newest(table))

    def tick(self, now_s: float) -> None:
        """Judge what has become complete, and write. Units: unix seconds."""
        passed_s, self._unix_s = now_s - self._unix_s, now_s
        self._steady_s += passed_s if 0.0 <= passed_s <= _LONGEST_TICK_S else _TICK_S
        live = self._live
        try:
            if live is not None:
                live.correlations = self._spans.correlations(live.peers.num_ranks)
                # step by step: a verdict says what was known when it became sure, not what came with the same batch
                while live.advance(self._steady_s, at_most=1):
                    self._assessment = self._with_devices(live.assessment)
                    self._decide(now_s, self._assessment.findings)
                self._complain_of_silence(live)
            self._decide(now_s, self.assessment.findings)
            self._write(now_s)
        except CoordinationError as error:
            self._next_write_s = self._steady_s + _AGAIN_S
            self._complain(f"verdicts wait, {len(self._waiting)} of them: {error}")

    def _begin_round(self) -> None:
        """Drop everything: of another round it says nothing."""
        self._assessment = Assessment()
        try:
            roster = self._book.roster()
        except DataError as error:
            _logger.warning("round %d cannot be judged: %s", self._book.newest, error)
            self._live = None
            return
        self._live = LiveDetection(roster, thresholds_of(self._section()), STEP_DEADLINE_S)
        self._numerics = NumericsWatch(self._section().loss_jump_factor, roster.layout.world_size)
        self._spans = SpanWindow()
        self._alarms = []

    def _take_hosts(self) -> None:
        try:
            roster = self._book.roster()
        except DataError as error:
            self._complain(str(error))
            return
        if self._live is None or roster.layout != self._live.roster.layout:
            self._begin_round()  # the first rank reported another layout than most do
        elif roster.hosts != self._live.roster.hosts:
            self._live.set_roster(roster)

    def _decide(self, now_s: float, findings: tuple[Finding, ...]) -> None:
        """Make verdicts of what is new. Raises: CoordinationError while it is not known what was said before."""
        number = self._book.newest
        if number < 0 or not (findings or self._alarms):
            return
        if self._told is None:
            if self._steady_s < self._next_write_s:
                return
            self._told = self._log.told(number)
        self._told = self._told.for_round(number)
        writer = Writer(self._session, self._section().straggler_steps, self._num_written)
        alarms, self._alarms = self._alarms, []
        for key, verdict in judge(now_s, self._weighed(findings, self._told), alarms, self._told, writer):
            self._told = self._told.with_verdict(key, verdict)
            self._num_written += 1
            self._waiting.append(verdict)

    def _write(self, now_s: float) -> None:
        """Raises: CoordinationError while etcd is away; what was decided is kept."""
        if self._steady_s < self._next_write_s:
            return
        while self._waiting:
            self._log.write(self._waiting[0])
            said = self._waiting.popleft()
            about = said.kind.value if said.kind is VerdictKind.NUMERICS else said.cause.value
            _logger.warning(
                "verdict %s: %s, %s confidence: %s",
                *(said.verdict_id, about, said.confidence.value, "; ".join(said.evidence)),
            )
        findings = self.assessment.findings
        if findings:
            reason = f"suspicion: {findings[0].cause.value} ({', '.join(findings[0].hosts)})"
            self._full_spans.ask(now_s, self._steady_s, reason)

    def _with_devices(self, known: Assessment) -> Assessment:
        findings = tuple(self._beside(one, self._book.newest) for one in known.findings)
        return replace(known, findings=findings) if findings else known

    def _weighed(self, findings: tuple[Finding, ...], told: Told) -> list[Finding]:
        """Return the findings, the gain of those that the driver may act upon being that of a replay if possible."""
        found = []
        for one in findings:
            is_new = one.confidence is VerdictConfidence.HIGH and (one.key, one.confidence) not in told.keys
            if is_new and one.cause is Cause.COMPUTE and self._live is not None:
                gain_s = self._spans.gain_without(one.ranks, one.first_step, self._live.roster)
                if gain_s is not None and gain_s < one.gain_s:
                    said = f"what-if: without it a step would be {1e3 * gain_s:.1f} ms shorter"
                    one = replace(one, gain_s=gain_s, evidence=(*one.evidence, said))
            found.append(one)
        return found

    def _complain_of_silence(self, live: LiveDetection) -> None:
        silent = live.silent_ranks()
        if silent:
            shown = ", ".join(map(str, silent[:16])) + (" ..." if len(silent) > 16 else "")
            self._complain(f"0 samples from {len(silent)} ranks in the newest steps: {shown}")

    def _complain(self, text: str) -> None:
        """Say something at most once a minute."""
        if self._steady_s >= self._next_complaint_s:
            self._next_complaint_s = self._steady_s + _COMPLAINT_S
            _logger.warning("%s", text)

"""The daemon's /metrics: combines numbers from rows, records in etcd and the newest scores at each scrape."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megatrain import __version__
from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.errors import ConfigError
from megatrain_diagnostics.analysis.findings import StragglerAssessment
from megatrain_diagnostics.collector.counters import IngestStatistics
from megatrain_diagnostics.metrics.exposition import JobCollector, registry_of
from megatrain_diagnostics.metrics.job_records import SavedCheckpointWatch, SaveFailures, records_of
from megatrain_diagnostics.metrics.readings import JobReading
from megatrain_diagnostics.metrics.server import MetricsServer, read_token
from megatrain_diagnostics.metrics.training_metrics import TrainingMetrics, refused_by_reason
from megatrain_job.jobs.etcd_job import EtcdJob

_logger = logging.getLogger(__name__)


class AssessmentSource(Protocol):
    """The part of the daemon's controller that the metrics use."""

    @property
    def assessment(self) -> StragglerAssessment: ...
    def silent_ranks(self) -> tuple[int, ...]: ...


class StoreSize(Protocol):
    """The part of the store that the metrics use."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class MetricsParts:
    """The sources of the numbers."""

    training: TrainingMetrics
    statistics: IngestStatistics
    judge: AssessmentSource
    store: StoreSize
    etcd: EtcdJob
    failures: SaveFailures


def reading_of(parts: MetricsParts, checkpoints: SavedCheckpointWatch, job: str) -> JobReading:
    """Return the current reading."""
    counters, saved = parts.statistics.counters(), checkpoints.saved
    judged = parts.judge.assessment
    known = records_of(parts.etcd.last_poll, time.time())
    return replace(
        parts.training.reading(job, __version__),
        health=known.health,
        rounds=known.rounds,
        incidents=known.incidents,
        effective_time_ratio=known.effective_time_ratio,
        saved_step=None if saved is None else saved.step,
        saved_unix_s=None if saved is None else saved.at_unix_s,
        save_failures=parts.failures.count,
        verdicts=known.verdicts,
        notices_sent={receiver.receiver: receiver.num_sent for receiver in known.receivers},
        notices_failed={receiver.receiver: receiver.num_failed for receiver in known.receivers},
        notices_given_up={receiver.receiver: receiver.num_given_up for receiver in known.receivers},
        straggler_scores=judged.host_scores,
        least_straggler_score=None if judged.thresholds is None else judged.thresholds.score,
        silent_ranks=len(parts.judge.silent_ranks()),
        rows_stored=counters.stored_rows,
        rows_rejected=refused_by_reason(counters.refused_rows),
        rows_dropped=sum(counters.dropped_rows.values()),
        rows_not_analyzed={"ended-round": counters.old_rows, "overload": counters.skipped_rows},
        batches={"new": counters.batches, "repeated": counters.duplicate_batches},
        bytes_received=counters.num_bytes,
        failed_commits=counters.failed_commits,
        connected_hosts=len(counters.connected),
        segment_bytes=parts.store.num_bytes,
    )


@contextmanager
def served_metrics(parts: MetricsParts, job: str, checkpoints: Path, section: DiagnosticsConfig) -> Iterator[int]:
    """Serve /metrics of a job during the block and yield the port; if that fails, log a warning and yield 0."""
    with ExitStack() as closing:
        watch = SavedCheckpointWatch(checkpoints)
        closing.callback(watch.close)
        collector = JobCollector(lambda: reading_of(parts, watch, job))
        try:
            server = _server(collector, section)
        except ConfigError as error:
            _logger.warning("/metrics of this job is not served: %s", error)
            yield 0
            return
        closing.callback(server.close)
        yield server.port


def _server(collector: JobCollector, section: DiagnosticsConfig) -> MetricsServer:
    """Start the server. Raises: ConfigError."""
    token = read_token(section.metrics_token_file)
    address, port = section.metrics_address, section.daemon_metrics_port
    return MetricsServer(registry_of(collector), address, port, token, key="diagnostics.daemon_metrics_port")

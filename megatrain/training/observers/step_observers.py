"""The observers of a worker, in the order in which the step loop calls them."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.config.runtime import RuntimeConfig
from megatrain.reporting import Reporter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.extensions import Callback
from megatrain.training.observers.device_memory import device_memory
from megatrain.training.observers.garbage_collection import PlannedGarbageCollection
from megatrain.training.observers.overlap_watch import OverlapWatch
from megatrain.training.observers.profiler import StepProfiler
from megatrain.training.observers.step_observer import CompletedStep, StepObserver
from megatrain.training.observers.step_reports import Heartbeat, StepReports, StepValues
from megatrain.training.rank_model import RankModel
from megatrain.training.stopping.stop_notice import StopNotice


class ExchangeTimeouts(StepObserver):
    """Sets runtime.first_step_timeout_s for the first step of this process, then runtime.step_timeout_s."""

    def __init__(self, mesh: Mesh, settings: RuntimeConfig) -> None:
        self._mesh = mesh
        self._settings = settings
        self._is_first = True

    def before_step(self, index: int) -> None:
        if self._is_first:
            self._mesh.set_timeout(self._settings.first_step_timeout_s)

    def after_step(self, done: CompletedStep) -> str:
        if self._is_first:
            self._is_first = False
            self._mesh.set_timeout(self._settings.step_timeout_s)
        return ""


def step_observers(
    config: Config,
    rank_model: RankModel,
    recorder: Recorder,
    reporter: Reporter | None,
    profiler: StepProfiler,
    garbage: PlannedGarbageCollection,
    callbacks: Sequence[Callback] = (),
) -> tuple[StepObserver, ...]:
    """Return the observers of a worker. The heartbeat comes before the observers that read a step's totals, because it
    completes the totals.

    reporter: None on all ranks except the reporting rank. profiler, garbage: the caller closes them. callbacks: receive
    the report of each step after the reporter.
    """
    memory, layout = device_memory(rank_model.device), rank_model.mesh.layout
    receivers = [callback.on_step for callback in callbacks]
    if reporter is not None:
        receivers.insert(0, reporter.step)
    reports = [StepReports(receivers, recorder, memory, world_size=layout.world_size)] if receivers else []
    return (
        ExchangeTimeouts(rank_model.mesh, config.runtime),
        Heartbeat(recorder),
        OverlapWatch(config, layout, recorder.step_summary),
        StopNotice(config.runtime.save_grace_s, recorder.progress),
        StepValues(config, rank_model, recorder, memory),
        profiler,
        *reports,
        garbage,
        memory,
    )

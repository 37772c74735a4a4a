"""The report of each step, for the reporter and for callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.contracts.black_box.operations import Operation
from megatrain.reporting import StepReport
from megatrain.telemetry.recorder import Recorder
from megatrain.training.observers.device_memory import DeviceMemory
from megatrain.training.observers.step_observer import CompletedStep, StepObserver


class StepReports(StepObserver):
    """Passes the report of each step to `receivers`, one after the other."""

    def __init__(
        self,
        receivers: Sequence[Callable[[StepReport], None]],
        recorder: Recorder,
        memory: DeviceMemory,
        *,
        seq_len: int,
        world_size: int,
    ) -> None:
        self._receivers = receivers
        self._recorder = recorder
        self._memory = memory
        self._seq_len = seq_len
        self._world_size = world_size

    def after_step(self, done: CompletedStep) -> str:
        summary, progress = self._recorder.step_summary(), done.progress
        report = StepReport(
            step=progress.step,
            loss=done.outcome.loss,
            grad_norm=done.outcome.grad_norm,
            lr=done.lr,
            duration_s=done.duration_s,
            data_wait_s=summary.sum_ms(Operation.DATA_WAIT) / 1e3 if summary is not None else 0.0,
            num_tokens=done.batch.global_batch_size * self._seq_len,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            global_batch_size=done.batch.global_batch_size,
            is_skipped=done.outcome.is_skipped,
            num_skipped=progress.num_skipped,
            memory_bytes=self._memory.peak_bytes(),
            world_size=self._world_size,
        )
        for receive in self._receivers:
            receive(report)
        return ""

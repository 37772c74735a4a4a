"""Reports of each step: to this rank's black box for the diagnosis, and to the reporter and callbacks.

The heartbeat shows the current step and the last completed step. Every rank records its own values, because any rank
may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.reporting import StepReport
from megatrain.telemetry.flops import compute_cost, device_name
from megatrain.telemetry.recorder import Recorder
from megatrain.training.observers.device_memory import DeviceMemory
from megatrain.training.observers.step_observer import CompletedStep, StepObserver
from megatrain.training.rank_model import RankModel
from megatrain.training.read_records import values_of_reads

_CACHE_VALUES = (
    StepValue.CACHE_HIT_BYTES,
    StepValue.CACHE_FETCHED_BYTES,
    StepValue.CACHE_EVICTED_BYTES,
    StepValue.CACHE_NOT_STORED,
)
"""In the order of CacheUse."""


class Heartbeat(StepObserver):
    """Records in the black box that a step begins or is complete. Executor, watchdog and daemon read these records."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def before_step(self, index: int) -> None:
        self._recorder.set_step(index)

    def after_step(self, done: CompletedStep) -> str:
        self._recorder.complete_step()
        return ""


class StepValues(StepObserver):
    """Writes the values of each step to the black box: loss, gradient norm, tokens, data loader, FLOPs, memory."""

    def __init__(self, config: Config, rank_model: RankModel, recorder: Recorder, memory: DeviceMemory) -> None:
        self._world_size = rank_model.mesh.layout.world_size
        self._num_replaced = 0 if config.data.bad_samples == "replace" else None
        self._is_on_gpu = rank_model.device.type == "cuda"
        self._cost = compute_cost(config, device_name(rank_model.device))
        self._recorder = recorder
        self._memory = memory

    def after_step(self, done: CompletedStep) -> str:
        record = self._recorder.record_value
        num_tokens, seq_len = done.batch.num_tokens, done.batch.seq_len
        record(StepValue.LOSS, done.outcome.loss)
        record(StepValue.GRAD_NORM, done.outcome.grad_norm)
        record(StepValue.TOKENS, num_tokens)
        record(StepValue.LABEL_TOKENS, done.batch.num_label_tokens)
        record(StepValue.SQUARED_LENGTHS, done.batch.squared_lengths)
        record(StepValue.DOCUMENTS, done.batch.num_documents)
        if self._num_replaced is not None:
            self._num_replaced += len(done.batch.bad_samples)
            record(StepValue.REPLACED_SAMPLES, self._num_replaced)
        for kind, value in values_of_reads(done.batch):
            record(kind, value)
        if done.batch.cache_use is not None:
            for kind, value in zip(_CACHE_VALUES, done.batch.cache_use, strict=True):
                record(kind, value)
        flops = self._cost.flops_per_token(seq_len, done.batch.num_pictures / done.batch.global_batch_size)
        record(StepValue.MODEL_FLOPS, num_tokens / self._world_size * flops)
        if self._cost.peak is not None:
            record(StepValue.PEAK_FLOPS, self._cost.peak)
        if self._is_on_gpu:
            record(StepValue.DEVICE_BYTES, self._memory.peak_bytes())
        return ""


class StepReports(StepObserver):
    """Passes the report of each step to `receivers`, one after the other."""

    def __init__(
        self,
        receivers: Sequence[Callable[[StepReport], None]],
        recorder: Recorder,
        memory: DeviceMemory,
        *,
        world_size: int,
    ) -> None:
        self._receivers = receivers
        self._recorder = recorder
        self._memory = memory
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
            num_tokens=done.batch.num_tokens,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            global_batch_size=done.batch.global_batch_size,
            num_pictures=done.batch.num_pictures,
            is_skipped=done.outcome.is_skipped,
            num_skipped=progress.num_skipped,
            memory_bytes=self._memory.peak_bytes(),
            world_size=self._world_size,
            num_replaced=sum(done.outcome.num_replaced),
            sources=done.outcome.sources,
        )
        for receive in self._receivers:
            receive(report)
        return ""

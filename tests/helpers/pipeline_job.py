"""Steps of an invented job: a schedule executed with given durations, as the public traces record it.

The simulation walks over the stages' action lists, all data-parallel ranks and steps at once; it shares no code with
the analysis that is tested and measured with it. Messages and collectives start when all participants have arrived;
nothing else waits.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatrain.schedule import ActionKind, Schedule, build_schedule
from megatrain_diagnostics.analysis.whatif.operations import JobShape, OperationTable

Times = NDArray[np.float64]

FORWARD_S, BACKWARD_S, MESSAGE_S, COLLECTIVE_S = 0.1, 0.2, 0.002, 0.03


@dataclass(frozen=True)
class PipelineJob:
    """The simulated job. Factors multiply compute time; `noise`, `gaps`: standard deviations, gaps in units of
    FORWARD_S."""

    pp_size: int = 2
    dp_size: int = 2
    tp_size: int = 1
    num_chunks: int = 1
    num_microbatches: int = 4
    schedule: str = "1f1b"
    """For one chunk per stage; several chunks are interleaved."""
    steps: tuple[int, ...] = (10, 20, 30)
    noise: float = 0.0
    gaps: float = 0.0
    """The delay of computes without a recorded reason."""
    is_overlapped: bool = False
    """Gradients of a chunk are reduced as soon as its last backward has ended."""
    separate_s: float = COLLECTIVE_S
    """The duration of the exchanges beside the chunks, if gradients are reduced with overlap."""
    slow_stages: dict[int, float] = field(default_factory=dict)
    slow_dp_ranks: dict[int, float] = field(default_factory=dict)
    slow_cells: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (dp rank, stage)."""
    seed: int = 0

    @property
    def shape(self) -> JobShape:
        return JobShape(
            trial_name="made",
            dp_size=self.dp_size,
            pp_size=self.pp_size,
            tp_size=self.tp_size,
            num_chunks=self.num_chunks,
            world_size=self.dp_size * self.pp_size * self.tp_size,
        )

    def run(self) -> OperationTable:
        """Return the operations of all steps."""
        return _Walk(self).run()


_MEANS_S = {
    ActionKind.FORWARD: FORWARD_S,
    ActionKind.BACKWARD: BACKWARD_S,
    ActionKind.DGRAD: 0.5 * BACKWARD_S,
    ActionKind.WGRAD: 0.5 * BACKWARD_S,
}


@dataclass(frozen=True)
class _Row:
    kind: str
    stage: int
    chunk: int
    microbatch: int
    start: Times
    end: Times


class _Walk:
    def __init__(self, job: PipelineJob) -> None:
        self.job = job
        name = "interleaved" if job.num_chunks > 1 else job.schedule
        self.schedule: Schedule = build_schedule(name, job.pp_size, job.num_chunks, job.num_microbatches)
        self.rng = np.random.default_rng(job.seed)
        self.lanes = (job.dp_size, len(job.steps))
        self.zero = np.zeros(self.lanes)
        self.rows: list[_Row] = []
        self.free = [self.zero] * job.pp_size
        """The time at which each stage's last compute has ended."""
        self.last_of_kind: dict[tuple[int, ActionKind], Times] = {}
        self.channel_free: dict[tuple[int, str], Times] = defaultdict(lambda: self.zero)
        self.sent: dict[tuple[str, int], list[tuple[Times, Times, int, int]]] = defaultdict(list)
        """Start and duration of sends, by kind and receiving stage."""
        self.dp_free: dict[int, Times] = defaultdict(lambda: self.zero)
        self.gathered: dict[tuple[int, int], Times] = {}

    def run(self) -> OperationTable:
        for stage in range(self.job.pp_size):
            for chunk in range(self.job.num_chunks):
                self.gathered[stage, chunk] = self.collective("params-all-gather", stage, chunk, self.zero)
        at = [0] * self.job.pp_size
        while any(place < len(actions) for place, actions in zip(at, self.schedule.stages, strict=True)):
            before = list(at)
            for stage, actions in enumerate(self.schedule.stages):
                while at[stage] < len(actions) and self.can(stage, actions[at[stage]]):
                    self.act(stage, actions[at[stage]])
                    at[stage] += 1
            assert at != before, "the schedule is stuck"
        self.finish()
        return self.table()

    def vary(self, mean: float) -> Times:
        return mean * np.maximum(0.2, 1.0 + self.job.noise * self.rng.standard_normal(self.lanes))

    def compute_time(self, kind: ActionKind, stage: int) -> Times:
        time = self.vary(_MEANS_S[kind])
        time = time * self.job.slow_stages.get(stage, 1.0)
        for dp, factor in self.job.slow_dp_ranks.items():
            time[dp] *= factor
        for (dp, slow_stage), factor in self.job.slow_cells.items():
            if slow_stage == stage:
                time[dp] *= factor
        return time

    def model_chunk(self, stage: int, chunk: int) -> int:
        return chunk * self.job.pp_size + stage

    def receive_kind(self, kind: ActionKind) -> str:
        return "forward-recv" if kind is ActionKind.FORWARD else "backward-recv"

    def has_message(self, stage: int, chunk: int, kind: ActionKind, is_receive: bool) -> bool:
        towards = 1 if kind is ActionKind.FORWARD else -1
        peer = self.model_chunk(stage, chunk) + (-towards if is_receive else towards)
        return self.job.pp_size > 1 and 0 <= peer < self.job.pp_size * self.job.num_chunks

    @property
    def has_idle_messages(self) -> bool:
        """Return whether the model's input and loss also have messages in a trace, which take no time."""
        return self.job.num_chunks > 1 and self.job.pp_size > 1

    def can(self, stage: int, action) -> bool:
        if action.kind not in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.DGRAD):
            return True
        if not self.has_message(stage, action.chunk, action.kind, True):
            return True
        return bool(self.sent[self.receive_kind(action.kind), stage])

    def act(self, stage: int, action) -> None:
        if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.DGRAD):
            self.compute(stage, action.kind, action.chunk, action.microbatch)
        elif action.kind is ActionKind.WGRAD:
            end = self.free[stage] + self.compute_time(action.kind, stage)
            self.rows.append(
                _Row("backward-weight-compute", stage, action.chunk, action.microbatch, self.free[stage], end)
            )
            self.free[stage] = end
        elif action.kind is ActionKind.REDUCE and self.job.is_overlapped:
            self.collective("grads-reduce-scatter", stage, action.chunk, self.free[stage])

    def compute(self, stage: int, kind: ActionKind, chunk: int, microbatch: int) -> None:
        ready = self.free[stage]
        posted = self.last_of_kind.get((stage, kind), self.zero)
        if kind is not ActionKind.FORWARD and (stage, kind) not in self.last_of_kind:
            posted = self.first_backward_posted(stage)
        receive = self.receive_kind(kind)
        if self.has_message(stage, chunk, kind, True):
            sent, duration, _, _ = self.sent[receive, stage].pop(0)
            post = np.maximum(posted, self.channel_free[stage, receive])
            arrived = np.maximum(post, sent) + duration
            self.message(receive, stage, post, arrived)
            peer = (stage + (-1 if kind is ActionKind.FORWARD else 1)) % self.job.pp_size
            self.message(receive.replace("recv", "send"), peer, sent, arrived)
            ready = np.maximum(ready, arrived)
        elif self.has_idle_messages:
            post = np.maximum(posted, self.channel_free[stage, receive])
            self.message(receive, stage, post, post)
        if kind is ActionKind.FORWARD:
            ready = np.maximum(ready, self.gathered[stage, chunk])
        if self.job.gaps:
            ready = ready + np.abs(self.rng.standard_normal(self.lanes)) * self.job.gaps * FORWARD_S
        end = ready + self.compute_time(kind, stage)
        name = "forward-compute" if kind is ActionKind.FORWARD else "backward-compute"
        self.rows.append(_Row(name, stage, chunk, microbatch, ready, end))
        self.free[stage] = self.last_of_kind[stage, kind] = end
        self.send(stage, kind, chunk, end)

    def first_backward_posted(self, stage: int) -> Times:
        """The channel of the backward opens when the second-to-last compute before the first backward has ended."""
        ends = [row.end for row in self.rows if row.stage == stage and row.kind == "forward-compute"]
        return ends[-2] if len(ends) > 1 else self.zero

    def send(self, stage: int, kind: ActionKind, chunk: int, end: Times) -> None:
        towards = 1 if kind is ActionKind.FORWARD else -1
        receive = self.receive_kind(kind)
        send = receive.replace("recv", "send")
        start = np.maximum(end, self.channel_free[stage, send])
        if self.has_message(stage, chunk, kind, False):
            self.sent[receive, (stage + towards) % self.job.pp_size].append((start, self.vary(MESSAGE_S), chunk, stage))
        elif self.has_idle_messages:
            self.message(send, stage, start, start)

    def message(self, kind: str, stage: int, start: Times, end: Times) -> None:
        self.rows.append(_Row(kind, stage, -1, -1, start, end))
        self.channel_free[stage, kind] = np.maximum(self.channel_free[stage, kind], end)

    def collective(self, kind: str, stage: int, chunk: int, ready: Times, mean_s: float = COLLECTIVE_S) -> Times:
        start = np.maximum(ready, self.dp_free[stage])
        end = np.broadcast_to(start.max(axis=0) + self.vary(mean_s)[0], self.lanes)
        self.rows.append(_Row(kind, stage, chunk, -1, start, end))
        self.dp_free[stage] = end
        return end

    def finish(self) -> None:
        ready = []
        for stage in range(self.job.pp_size):
            end = self.free[stage]
            self.rows.append(_Row("gc", stage, 0, -1, end, end))
            if self.job.is_overlapped:
                end = np.maximum(end, self.dp_free[stage])
            norms = end + self.vary(1e-4)
            self.rows.append(_Row("layernorm-grads-all-reduce", stage, -1, -1, end, norms))
            ready.append(norms)
        ends = sorted({0, self.job.pp_size - 1})
        summed = np.maximum.reduce([ready[stage] for stage in ends]) + self.vary(0.01)
        for stage in ends:
            self.rows.append(_Row("embedding-grads-all-reduce", stage, -1, -1, ready[stage], summed))
            ready[stage] = summed
        for stage in range(self.job.pp_size):
            if self.job.is_overlapped:
                ready[stage] = self.collective(
                    "separate-grads-all-reduce", stage, -1, ready[stage], self.job.separate_s
                )
            else:
                for chunk in range(self.job.num_chunks):
                    ready[stage] = self.collective("grads-reduce-scatter", stage, chunk, ready[stage])
        clipped = np.broadcast_to(np.maximum.reduce(ready).max(axis=0) + self.vary(0.005)[0], self.lanes)
        for stage in range(self.job.pp_size):
            self.rows.append(_Row("optimizer-clip-main-grad", stage, -1, -1, ready[stage], clipped))
            self.rows.append(_Row("optimizer", stage, -1, -1, clipped, clipped + self.vary(0.02)))

    def table(self) -> OperationTable:
        """Return the rows as columns; the n-th of a kind and stage by start is number n."""
        kinds = tuple(sorted({row.kind for row in self.rows}))
        rows = sorted(self.rows, key=lambda row: (row.kind, row.stage, float(row.start[0, 0])))
        counts: dict[tuple[str, int], int] = defaultdict(int)
        sequence = []
        for row in rows:
            sequence.append(counts[row.kind, row.stage])
            counts[row.kind, row.stage] += 1
        dp_size, num_steps = self.lanes
        lanes = dp_size * num_steps

        def every(values) -> NDArray[np.int64]:
            return np.repeat(np.asarray(list(values), dtype=np.int64), lanes)

        dp_rank = np.tile(np.repeat(np.arange(dp_size), num_steps), len(rows))
        stage = every(row.stage for row in rows)
        start = np.concatenate([row.start.reshape(-1) for row in rows])
        return OperationTable(
            kinds=kinds,
            dp_rank=dp_rank,
            stage=stage,
            rank=(stage * dp_size + dp_rank) * self.job.tp_size,
            step=np.tile(np.asarray(self.job.steps, dtype=np.int64), len(rows) * dp_size),
            kind=every(kinds.index(row.kind) for row in rows),
            start_s=start,
            duration_s=np.concatenate([row.end.reshape(-1) for row in rows]) - start,
            sequence=every(sequence),
            chunk=every(row.chunk for row in rows),
            model_chunk=every(self.model_chunk(row.stage, row.chunk) if row.microbatch >= 0 else -1 for row in rows),
            microbatch=every(row.microbatch for row in rows),
        )

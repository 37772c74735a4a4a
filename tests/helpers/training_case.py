"""A tiny job on one rank: the real step loop on real token batches; everything that can be compared is returned.

The rank drives the trainer itself; a recording reporter and reader replace those of the job, and a test's Orders make
it stop, die, hang or corrupt a gradient at a given step.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint.load import FP8_HISTORY
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.comm import Mesh, create_mesh, join, open_rendezvous
from megatrain.comm.exchange import Exchange
from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Coordinate
from megatrain.contracts.process import Process
from megatrain.contracts.records.rounds import Rollback
from megatrain.contracts.step_plan import NO_SAMPLE, StepPlan
from megatrain.data.dataset import open_dataset
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader
from megatrain.data.step_batch import StepBatch
from megatrain.data.token_stream import SamplePieces
from megatrain.ops.main_grad import Addition, MainGrad, main_grad_of, set_main_grad
from megatrain.reporting import EvaluationReport, StepReport
from megatrain.run_files.run_directory import RunDirectory
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.training.observers.garbage_collection import PlannedGarbageCollection
from megatrain.training.observers.profiler import StepProfiler
from megatrain.training.observers.step_observers import step_observers
from megatrain.training.picture_data import find_decoder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step_loop import StepLoop, StepLoopParts
from megatrain.training.training_data import (
    ValidationSet,
    all_shards,
    balanced_cost,
    open_reader,
    open_validation,
    sample_stream,
)
from tests.helpers.faults import RankFault, faulty_rank, faulty_writers
from tests.helpers.one_source import reader_of_one, stream_of_one
from tests.helpers.rank_protocol import RankContext
from tests.helpers.waiting import wait_until

DEATH_EXIT_CODE = 7
STATE_KINDS = ("master", "exp_avg", "exp_avg_sq", "momentum", "ema", FP8_HISTORY)

TINY: Mapping[str, Mapping[str, Any]] = {
    "model": {"vocab_size": 90, "seq_len": 16, "hidden_size": 32, "num_layers": 4, "num_heads": 8, "vocab_multiple": 8},
    # several buckets per chunk, and shards whose ends are within parameters
    "parallel": {"bucket_size": 3000},
    "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    "train": {"steps": 3, "precision": "fp64", "seed": 7, "gc_interval": 0},
    # warm-up, decay and effective clipping: a wrong step number after a resume changes the result, and so does a wrong
    # norm
    "optimizer": {"lr": 1e-3, "lr_schedule": "cosine", "lr_warmup_steps": 2, "grad_clip": 0.5},
    "data": {"prefetch": 1},
    # The writer of a finished job ends at once, and removes its arena.
    "checkpoint": {"interval_s": 0.0, "save_at_end": False, "keep_arena_s": 0.0},
    "runtime": {"device": "cpu", "threads": 1},
    "telemetry": {"black_box_directory": "", "black_box_records": 1024},
}


def make_config(*changes: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the tiny configuration, changed by tables as in `make_config({"model": {"dropout": 0.1}})`.

    Raises: AssertionError if the program itself would refuse it.
    """
    tables = {name: dict(table) for name, table in TINY.items()}
    for change in changes:
        for name, table in change.items():
            tables[name] = tables.get(name, {}) | dict(table)
    config = Config.from_dict(tables)
    problems = check(config, {}, config.layout(None).world_size)
    assert not problems, problems
    return config


def on_layout(tp_size: int, pp_size: int, dp_size: int, num_chunks: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    """Return the tables of a layout; more than one chunk means the interleaved schedule.

    Micro-batches are as large as possible while there are two, and as many as stages, where the tiny global batch
    allows it: the cost of a job on many ranks is its number of exchanges.
    """
    name = "interleaved" if num_chunks > 1 else schedule
    sizes = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": dp_size, "num_chunks": num_chunks}
    micro_batch_size = max(1, TINY["batch"]["global_batch_size"] // (max(2, pp_size) * dp_size))
    return {"parallel": {**sizes, "schedule": name}, "batch": {"micro_batch_size": micro_batch_size}}


@dataclass(frozen=True, slots=True)
class Poison:
    """Multiplies the gradient of one parameter by `factor`, on one rank, in one micro-batch of each of `steps`.

    steps and micro-batch (in the order of the backwards) count from 0.
    """

    rank: int
    steps: tuple[int, ...]
    parameter: str
    microbatch: int = 0
    factor: float = float("nan")


@dataclass(frozen=True, slots=True)
class CaseOrders:
    """The faults of a job: (rank, step) is a fault of that rank when that step, counted from 0, begins.

    stop_at: it is asked to stop. die_at: its process ends. die_in: (rank, operation, number) ends a rank when it is the
    turn of its exchange of that operation with that number, counted from 1. block_at: it does nothing until each of its
    peers has written a file rank-* to the directory `diary`. Writers obey the faults in the directory `writer_faults`,
    those of each host in host-0, host-1 and so on below it; hosts have an arena each, and the same number of ranks.
    """

    stop_at: tuple[int, int] | None = None
    die_at: tuple[int, int] | None = None
    die_in: tuple[int, Operation, int] | None = None
    block_at: tuple[int, int] | None = None
    fault: RankFault | None = None
    writer_faults: str = ""
    num_hosts: int = 1
    diary: str = ""
    poison: Poison | None = None
    rollback: Rollback | None = None
    hidden: tuple[int, int] = (0, 0)
    """Samples, from the first up to but not including the second, that the order never contained: the following samples
    take their numbers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that one rank holds. `is_owned`: this rank saves it."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: NDArray[Any]
    is_owned: bool = True


State = dict[str, list[Piece]]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The results of one rank. `digests` are of the optimizer's state after each step; `samples` are those read, by
    cursor.

    The parameters are as the model used them, before the first step and after the last; the states likewise.
    """

    coordinate: Coordinate
    steps: list[StepReport]
    digests: list[str]
    samples: dict[int, list[int]]
    evaluations: list[EvaluationReport]
    initial: list[Piece]
    final: list[Piece]
    initial_state: State
    final_state: State
    num_updates: int
    is_stopped: bool
    notes: list[str]


class _NotingReader:
    """Reads as BatchReader does and records the samples that this rank reads for itself."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        self.samples: dict[int, list[int]] = {}

    def following(self, stream: SampleStream) -> _NotingReader:
        self._reader = self._reader.following(stream)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_step(self, plan: StepPlan, replica: int, **options: bool) -> StepBatch:
        batch = self._reader.read_step(plan, replica, **options)
        read = np.concatenate([micro.sample_B for micro in batch.microbatches])
        self.samples[plan.cursor] = read[read != NO_SAMPLE].tolist()
        return batch


class _NotingReporter:
    """Replaces the reporter, on every rank."""

    def __init__(self, rank_model: RankModel) -> None:
        self._rank_model = rank_model
        self.steps: list[StepReport] = []
        self.digests: list[str] = []
        self.evaluations: list[EvaluationReport] = []
        self.notes: list[str] = []

    def step(self, report: StepReport) -> None:
        self.steps.append(report)
        digest = hashlib.blake2b()
        for _, state in self._rank_model.optimizer.states:
            for flat in state.tensors().values():
                digest.update(flat.numpy())
        self.digests.append(digest.hexdigest())

    def evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def print_line(self, text: str) -> None:
        self.notes.append(text)


def train_on_rank(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    """Run as one worker of the job, from joining to the last step. Runs on the pool."""
    mesh, recorder = _join(context, config, orders)
    rank_model = build_rank_model(config, mesh, recorder, mesh.device)
    validation = open_validation(config)
    training_data, stream = _data(config, orders, validation)
    reader = _NotingReader(training_data)
    reporter = _NotingReporter(rank_model)
    # A test that saves names a run directory; other tests get one that is not read.
    run = RunDirectory(Path(config.job.run_directory or context.init_method.removeprefix("file://") + ".run"))
    run.create()
    num_local_ranks = context.world_size // orders.num_hosts
    host, local_rank = divmod(context.rank, num_local_ranks)
    # A test that kills its ranks leaves the arena in the directory of the test.
    host_directory = run.root / f"host-{host}" if orders.num_hosts > 1 else run.root
    host_directory.mkdir(exist_ok=True)
    config = replace(config, checkpoint=replace(config.checkpoint, arena_directory=str(host_directory)))
    checkpoints = JobCheckpoints(
        config,
        mesh,
        rank_model.saved_shards(),
        stream,
        local_rank=local_rank,
        round_number=0,
        directory=str(run.checkpoints),
        logs=run.logs,
        rollback=orders.rollback,
    )
    garbage = PlannedGarbageCollection(config.train.gc_interval, recorder)
    profiler = StepProfiler(config.profile, context.rank, run.logs)
    trainer = StepLoop(
        StepLoopParts(
            config=config,
            rank_model=rank_model,
            reader=reader,
            validation=validation,
            checkpoints=checkpoints,
            recorder=recorder,
            observers=step_observers(config, rank_model, recorder, reporter, profiler, garbage),
            reporter=reporter,
            is_stop_requested=lambda: _obey(context, orders, trainer.step),
            extend_grace=lambda _: None,
        )
    )
    with ExitStack() as faults:
        # The process runs further jobs.
        faults.callback(garbage.close)
        if orders.fault is not None and orders.fault.rank in (None, context.rank):
            host_ranks = range(host * num_local_ranks, (host + 1) * num_local_ranks)
            faults.enter_context(faulty_rank(orders.fault, host_ranks))
        if orders.writer_faults:
            faults.enter_context(faulty_writers(Path(orders.writer_faults, f"host-{host}")))
        trainer.load()
        initial, initial_state = _parameters(rank_model), _state(rank_model)
        if orders.poison is not None and orders.poison.rank == context.rank:
            _poison(rank_model, orders.poison, lambda: trainer.step)
        trainer.train()
    checkpoints.close(is_done=True)
    return RankRecord(
        coordinate=mesh.coordinate,
        steps=reporter.steps,
        digests=reporter.digests,
        samples=reader.samples,
        evaluations=reporter.evaluations,
        initial=initial,
        final=_parameters(rank_model),
        initial_state=initial_state,
        final_state=_state(rank_model),
        num_updates=rank_model.optimizer.num_updates,
        is_stopped=trainer.is_stopped,
        notes=reporter.notes,
    )


def _data(config: Config, orders: CaseOrders, validation: Sequence[ValidationSet]) -> tuple[BatchReader, SampleStream]:
    if not config.data.train:
        reader = open_reader(config)
        find_decoder(config, all_shards(reader, validation), has_begun=False)
        return reader, sample_stream(config, reader, ())
    dataset, _ = open_dataset(Path(config.data.train), config.model.vocab_size)
    order_kind = type("Order", (_OrderWithout,), {"hidden": orders.hidden})
    order = order_kind(dataset.num_tokens, config.model.seq_len, config.resolved_data_seed)
    reader = reader_of_one(dataset, order, config.data.has_document_mask, balanced_cost(config))
    return reader, stream_of_one(dataset.num_tokens, config.resolved_data_seed, seq_len=config.seq_len)


def _join(context: RankContext, config: Config, orders: CaseOrders) -> tuple[Mesh, Recorder]:
    layout, device = config.layout(context.world_size), torch.device("cpu")
    rank, world_size = context.rank, context.world_size
    if world_size > 1:
        process = Process(rank, world_size, rank, world_size, 0, context.init_method)
        timeout_s = config.runtime.init_timeout_s
        join(open_rendezvous(process, job=config.job.name, timeout_s=timeout_s))
    recorder = open_recorder(
        Identity(config.job.name, "main", 0, rank, layout, os.getpid(), "host"),
        directory=config.telemetry.black_box_directory,
        run_key="test",
        num_records=config.telemetry.black_box_records,
    )
    parallel = config.parallel
    mesh = create_mesh(
        layout,
        rank,
        device,
        recorder,
        has_wrap_links=parallel.num_chunks > 1,
        holders=config.holders,
        has_sequence_chunks=parallel.num_sequence_chunks > 1,
        before_exchange=_killer(context.rank, orders),
    )
    return mesh, recorder


def _killer(rank: int, orders: CaseOrders) -> Callable[[Exchange], None] | None:
    """Return a function that kills this rank at an exchange, if that is requested."""
    if orders.die_in is None or orders.die_in[0] != rank:
        return None
    _, operation, number = orders.die_in
    turns = itertools.count(1)

    def die(exchange: Exchange) -> None:
        if exchange.operation is operation and next(turns) == number:
            os._exit(DEATH_EXIT_CODE)

    return die


def _obey(context: RankContext, orders: CaseOrders, step: int) -> bool:
    """Carry out the orders for this rank and step; return whether it is requested to stop."""
    here = (context.rank, step)
    if orders.die_at == here:
        os._exit(DEATH_EXIT_CODE)
    if orders.block_at == here:
        peers = context.world_size - 1
        wait_until(lambda: len(list(Path(orders.diary).glob("rank-*"))) == peers, "the errors of the peers")
    return orders.stop_at == here


class _OrderWithout(SampleOrder):
    """The order without some samples, as if it had never contained them."""

    hidden = (0, 0)

    def pieces(self, cursors: NDArray[np.int64]) -> SamplePieces:
        first, end = self.hidden
        return super().pieces(np.where(cursors >= first, cursors + (end - first), cursors))


def _parameters(rank_model: RankModel) -> list[Piece]:
    """Return the parameters as the model's next forward would use them; bf16 is widened, which changes no value."""
    pieces = []
    for chunk in rank_model.data_parallel:
        chunk.start_gather()
        chunk.finish_gather()
        for logical in (logical for bucket in chunk.buckets for logical in bucket.parameters):
            values = logical.parameter.detach()
            values = values.float() if values.dtype == torch.bfloat16 else values
            parts = values.flatten().split([placement.box.numel for placement in logical.placements])
            for placement, part in zip(logical.placements, parts, strict=True):
                array = part.view(placement.box.sizes).numpy().copy()
                pieces.append(Piece(placement.name, placement.global_shape, placement.box.offsets, array))
    return pieces


def _state(rank_model: RankModel) -> State:
    pieces: State = {kind: [] for kind in STATE_KINDS}
    for kind, shard, is_owner in rank_model.optimizer.flat_shards():
        values = shard.tensor.numpy().copy()
        pieces[kind].append(Piece(shard.name, shard.global_shape, shard.box.offsets, values, is_owner))
    for saved in rank_model.saved_shards():
        if saved.kind == FP8_HISTORY:
            shard, is_owner = saved.shard, saved.shard.holders.index == 0
            values = shard.tensor.numpy().copy()
            pieces[FP8_HISTORY].append(Piece(shard.name, shard.global_shape, shard.box.offsets, values, is_owner))
    return pieces


def _poison(rank_model: RankModel, poison: Poison, step: Callable[[], int]) -> None:
    """Corrupt the parameter's gradient where backward passes it on: nothing else of the step changes."""
    for chunk in rank_model.pipeline.chunks:
        for name, parameter in chunk.module.named_parameters():
            if name == poison.parameter:
                main_grad = main_grad_of(parameter)
                assert main_grad is not None
                corruption = _GradientCorruption(main_grad, poison, step)
                set_main_grad(parameter, corruption)
                parameter.register_hook(corruption.corrupted)
                return
    raise AssertionError(f"rank {poison.rank} holds no {poison.parameter}")


class _GradientCorruption:
    """A main_grad that scales the gradient of one micro-batch, and adds the others unchanged."""

    def __init__(self, main_grad: MainGrad, poison: Poison, step: Callable[[], int]) -> None:
        self._main_grad = main_grad
        self._poison = poison
        self._step = step
        self._num_backwards: dict[int, int] = {}

    def add(self, add: Addition) -> None:
        self._main_grad.add(partial(self._add, add, self._is_due()))

    def add_wgrad(self, add: Addition) -> None:
        self._main_grad.add_wgrad(partial(self._add, add, self._is_due()))

    def corrupted(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient that autograd passes; None if backward has already added it to the main_grad."""
        return gradient * self._poison.factor if gradient is not None and self._is_due() else None

    def _is_due(self) -> bool:
        microbatch = self._num_backwards.get(self._step(), 0)
        self._num_backwards[self._step()] = microbatch + 1
        return self._step() in self._poison.steps and microbatch == self._poison.microbatch

    def _add(self, add: Addition, is_due: bool, total: torch.Tensor, is_fresh: bool) -> None:
        add(total, is_fresh)
        if is_due:
            total.mul_(self._poison.factor)

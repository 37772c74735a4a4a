"""One worker from start to end: device, groups, model, data, the step loop, and closing after success or failure.

The process group is destroyed only after success. After a failure its peers may be gone, and waiting for them would
hide the error.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from megatrain.checkpoint.job import JobCheckpoints
from megatrain.checkpoint_format.branches import MAIN_BRANCH
from megatrain.checkpoint_format.claims import JobRound
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.comm import Mesh, create_mesh, join, leave, open_rendezvous
from megatrain.comm.group_stores import GroupStores
from megatrain.comm.rendezvous import Rendezvous
from megatrain.config.config import Config
from megatrain.config.serialize import CONFIG_NAME, config_values, recorded_values, to_toml
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import Process
from megatrain.formatting import count_text
from megatrain.ops.extension import load_extension
from megatrain.programs.background import LOWEST_PRIORITY, background_niceness
from megatrain.programs.stop_signals import StopSignals
from megatrain.reporting import Reporter
from megatrain.run_files.config_changes import CHANGES_NAME, ConfigChange, append_change, changed_keys
from megatrain.run_files.run_directory import RunDirectory
from megatrain.run_files.run_lock import checkpoints_locked
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.telemetry.timers import cuda_timer
from megatrain.training.cpu_binding import bind_process, gpu_pci_address, set_threads
from megatrain.training.device_settings import set_allocator, use_all_queues, use_expandable_segments
from megatrain.training.extensions import NO_EXTENSIONS, Extensions
from megatrain.training.first_start import check_storage_of_first_start, has_begun
from megatrain.training.kernel_readiness import kernel_note, processor_notes, refuse_gpu_backends, whole_sequence_notes
from megatrain.training.observers.garbage_collection import PlannedGarbageCollection
from megatrain.training.observers.profiler import StepProfiler
from megatrain.training.observers.step_observers import step_observers
from megatrain.training.picture_data import find_decoder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.same_start import check_same_config, check_same_costs, check_same_pictures
from megatrain.training.step_loop import StepLoop, StepLoopParts
from megatrain.training.stopping.watchdog import Watchdog
from megatrain.training.training_data import (
    all_shards,
    open_reader,
    open_validation,
    sample_stream,
    tokenizer_notes,
)


def run_worker(
    config: Config,
    process: Process,
    signals: StopSignals,
    watchdog: Watchdog,
    extensions: Extensions = NO_EXTENSIONS,
) -> ExitCode:
    """Train until the last step, or until the workers agree to stop because one of them got a request.

    Raises: MegatrainError; the black box is then kept, so that the cause can be found.
    """
    queues = use_all_queues(os.environ)
    # checked here, because the threads and programs that lower their priority start much later
    background_niceness(LOWEST_PRIORITY, os.environ)
    device, binding = _choose_device(config, process)
    run_directory = RunDirectory(Path(config.job.resolved_run_directory))
    # all files that are only read are opened before anything is written
    if process.rank == 0:
        check_storage_of_first_start(config, run_directory.root)
    reader, validation = open_reader(config), open_validation(config)
    find_decoder(config, all_shards(reader, validation), has_begun=has_begun(run_directory.root))
    notes = [*_device_notes(config, device, queues), *tokenizer_notes(config)]
    run_directory.create()
    with ExitStack() as closing:
        run_lock, job_round = None, _job_round(config, process)
        if process.rank == 0:
            run_lock = closing.enter_context(run_directory.locked(job_round))
            saving = closing.enter_context(checkpoints_locked(config.checkpoint.directory, job_round))
            notes += [lock.note for lock in (run_lock.lock, saving) if lock is not None and lock.note]
        rendezvous = open_rendezvous(process, job=config.job.name, timeout_s=config.runtime.init_timeout_s)
        if rendezvous is not None:
            process = rendezvous.process
            check_same_config(config, rendezvous)
            check_same_costs(reader.sources, rendezvous)
            check_same_pictures(all_shards(reader, validation), rendezvous)
        recorder = _open_recorder(config, process, run_directory, device)
        watchdog.follow(recorder.path)
        try:
            mesh = _join(config, process, rendezvous, device, recorder)
            reporter = None
            if run_lock is not None:
                reporter = closing.enter_context(Reporter(config, mesh.layout, device, run_directory, run_lock.check))
                reporter.print_line(f"run directory {run_directory.root.absolute()}; cores of rank 0: {binding}")
                for note in notes:
                    reporter.print_line(note)
            rank_model = build_rank_model(config, mesh, recorder, device, loss=extensions.loss)
            stream = sample_stream(config, reader, validation)
            checkpoints = _job_checkpoints(config, process, mesh, rank_model, stream, run_directory, job_round)
            profiler = closing.enter_context(StepProfiler(config.profile, process.rank, run_directory.logs))
            garbage = closing.enter_context(PlannedGarbageCollection(config.train.gc_interval, recorder))
            parts = StepLoopParts(
                config=config,
                rank_model=rank_model,
                reader=reader,
                validation=validation,
                checkpoints=checkpoints,
                recorder=recorder,
                observers=step_observers(
                    config, rank_model, recorder, reporter, profiler, garbage, extensions.callbacks
                ),
                reporter=reporter,
                is_stop_requested=lambda: signals.is_requested,
                extend_grace=watchdog.extend,
                callbacks=extensions.callbacks,
            )
            exit_code = _train(StepLoop(parts), parts, process, run_directory, signals)
        except BaseException:
            recorder.close(keep=True, has_failed=True)
            raise
        checkpoints.close(is_done=exit_code is ExitCode.OK)
        leave()
        recorder.close()
    return exit_code


def _job_checkpoints(
    config: Config,
    process: Process,
    mesh: Mesh,
    rank_model: RankModel,
    stream: SampleStream,
    run_directory: RunDirectory,
    job_round: JobRound | None,
) -> JobCheckpoints:
    return JobCheckpoints(
        config,
        mesh,
        rank_model.saved_shards(),
        stream,
        local_rank=process.local_rank,
        round_number=process.round,
        directory=config.checkpoint.directory or str(run_directory.checkpoints),
        logs=run_directory.logs,
        store_address=process.store,
        host=process.host,
        rollback=process.rollback,
        job_round=job_round,
    )


def _job_round(config: Config, process: Process) -> JobRound | None:
    if not process.round_counter:
        return None
    return JobRound(f"{config.job.name} (etcd cluster {process.round_counter})", process.round)


def _train(
    trainer: StepLoop, parts: StepLoopParts, process: Process, run_directory: RunDirectory, signals: StopSignals
) -> ExitCode:
    config, reporter = parts.config, parts.reporter
    trainer.load()
    if reporter is not None:
        _keep_config(config, run_directory, reporter, process.round, trainer.step)
    for callback in parts.callbacks:
        callback.on_start(config, process.rank, trainer.step)
    trainer.train()
    for callback in parts.callbacks:
        callback.on_end(trainer.step, trainer.is_stopped)
    if not trainer.is_stopped:
        return ExitCode.OK
    if reporter is not None:
        reporter.close()  # prints the last step line before the note
        cause = signals.name or "a signal to another worker"
        reporter.print_line(f"stopped at step {trainer.step} by {cause}; start the job again to continue")
    return ExitCode.SAVED_AND_STOPPED


def _keep_config(config: Config, run_directory: RunDirectory, reporter: Reporter, round_number: int, step: int) -> None:
    """Write this run's configuration and its changes to the run directory. Must be called after `StepLoop.load`, which
    refuses a configuration that does not fit the checkpoint.
    """
    path = run_directory.root / CONFIG_NAME
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    reporter.check_run_lock()
    try:
        before = recorded_values(run_directory.root)
        changed = () if before is None else changed_keys(before, config_values(config))
        if changed:
            change = ConfigChange(round_number, step, time.time(), changed)
            append_change(run_directory.diagnosis / CHANGES_NAME, change)
        temporary.write_text(to_toml(config))
        temporary.replace(path)
    except OSError as error:
        reporter.print_line(f"{path} could not be written ({error.strerror}); training continues")


def _open_recorder(config: Config, process: Process, run_directory: RunDirectory, device: torch.device) -> Recorder:
    identity = Identity(
        job=config.job.name,
        branch=MAIN_BRANCH,
        round=process.round,
        rank=process.rank,
        layout=config.layout(process.world_size),
        pid=os.getpid(),
        host=process.host or socket.gethostname(),
    )
    return open_recorder(
        identity,
        directory=config.telemetry.black_box_directory,
        run_key=run_directory.key,
        num_records=config.telemetry.black_box_records,
        timer=cuda_timer() if device.type == "cuda" else None,
    )


def _join(
    config: Config, process: Process, rendezvous: Rendezvous | None, device: torch.device, recorder: Recorder
) -> Mesh:
    runtime = config.runtime
    with recorder.span(Operation.INIT):
        join(rendezvous, network_interface=runtime.network_interface)
        stores = (
            None
            if rendezvous is None
            else GroupStores(
                rendezvous,
                ranks_per_store=runtime.ranks_per_store,
                timeout_s=runtime.init_timeout_s,
                network_interface=runtime.network_interface,
            )
        )
        return create_mesh(
            config.layout(process.world_size),
            process.rank,
            device,
            recorder,
            stores=stores,
            has_wrap_links=config.parallel.num_chunks > 1,
            holders=config.holders,
            has_sequence_chunks=config.parallel.num_sequence_chunks > 1,
            timeout_s=runtime.init_timeout_s,
        )


def _device_notes(config: Config, device: torch.device, queues: str) -> list[str]:
    """Set up a GPU's memory, and return notes for the log about the device. `queues`: the note on hardware queues.

    Raises: ConfigError, see kernel_note and refuse_gpu_backends.
    """
    if device.type != "cuda":
        refuse_gpu_backends(config)
        return [*processor_notes(config), *whole_sequence_notes(config)]
    allocator = use_expandable_segments(os.environ, set_allocator)
    kernels = kernel_note(config, torch.cuda.get_device_capability(device), load_extension())
    return [note for note in (kernels, allocator, queues, *whole_sequence_notes(config)) if note]


def _choose_device(config: Config, process: Process) -> tuple[torch.device, str]:
    """Bind the process to its cores and set its threads. Return this worker's device, and a text about the binding."""
    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            ['runtime.device="cuda": torch sees no CUDA device here; use "auto" or "cpu", or see `megatrain doctor`']
        )
    is_cpu = wanted == "cpu" or not torch.cuda.is_available()
    if not is_cpu and process.local_rank >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        problem = f"worker {process.local_rank} of this host has no GPU: the host has {found}"
        raise ConfigError([f"{problem}; start at most {count_text(found, 'worker')} here (torchrun --nproc-per-node)"])
    kind = config.runtime.cpu_binding
    address = "" if is_cpu or kind == "none" else gpu_pci_address(process.local_rank)
    binding = bind_process(kind, process.local_rank, process.local_world_size, address)
    threads = set_threads(config.runtime.threads)
    binding = f"{binding}, {count_text(threads, 'thread')}"
    if is_cpu:
        return torch.device("cpu"), binding
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device, binding

"""A whole job on one machine by one command: its own etcd, daemon and page if installed, and executors.

One host is an executor in this process; several hosts are separate processes (hosts.local). However the job ends, no
executor, worker or etcd is left running; if everything is saved, nothing is left in memory either.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import GOOD_ENDS, ExitCode
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import JobEnd
from megatrain.programs.stop_signals import StopSignals
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.commands.etcd_flags import etcd_arguments, without_password
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.etcd.process import EtcdProcess
from megatrain_launcher.executor.job_programs import ProgramSettings, reported_dashboard, running_programs
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.hosts.local import LocalHosts
from megatrain_launcher.launch.etcd_notice import published_problems
from megatrain_launcher.launch.plan import LaunchPlan
from megatrain_launcher.launch.templates import launch_arguments
from megatrain_launcher.leftovers import find_snapshots, release_snapshots, remove_black_boxes

Execute = Callable[[ExecutorSettings], int]
_LOOPBACK = "127.0.0.1"


def run_standalone(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    execute: Execute,
    report: Callable[[str], None],
    on_job_over: Callable[[], None] = lambda: None,
) -> int:
    """Run the job and return its exit code. Raises: MegatrainError; KeyboardInterrupt after a second Ctrl-C."""
    keys, launch_id = JobKeys(plan.config.job.name), secrets.token_hex(8)
    environment = without_password(environment)  # a password there is that of another etcd
    # in this order: a launch that does not get the lock of the directory must not clean it up
    with (
        EtcdProcess(plan.files.directory, plan.files.credentials()) as etcd,
        plan.files.recorded_end() as record,
        _without_leftovers(plan, report) as record_code,
    ):
        settings = etcd.settings
        began = forget_dead_hosts(settings, keys)
        with ExitStack() as stack:
            stack.enter_context(plan.files.published(etcd, keys.job, launch_id))
            stack.enter_context(published_problems(etcd, keys))
            if plan.flags.is_daemon_candidate:  # here, not in an executor: this process outlives all executors
                programs = ProgramSettings(plan.config, plan.files.run, settings, environment)
                stack.enter_context(reported_dashboard(settings, keys, report))
                stack.enter_context(running_programs(programs, report))
            if plan.total_hosts == 1:
                own = plan.executor_settings(settings, environment, launch_id=launch_id, address=_LOOPBACK)
                return record_code(record(execute(replace(own, is_daemon_candidate=False))))
            flags = replace(plan.flags, is_daemon_candidate=False)
            arguments = [*etcd_arguments(settings), f"--launch-id={launch_id}", f"--local-addr={_LOOPBACK}",
                     "--platform=local", *launch_arguments(flags, plan.max_hosts)]  # fmt: skip
            with LocalHosts(arguments, plan.total_hosts, environment, report) as hosts:

                def ask_to_stop(signal_name: str) -> None:
                    hosts.stop()
                    report(f"{signal_name}: the hosts save and stop (a second Ctrl-C ends them without saving)")

                with StopSignals(ask_to_stop) as stop:
                    codes = hosts.wait()
                    on_job_over()
            return record_code(record(_exit_code(settings, keys, began, codes, is_asked=stop.is_requested)))


def forget_dead_hosts(settings: EtcdSettings, keys: JobKeys) -> int:
    """Remove the keys of an earlier launch's hosts, election and problems from the job's own etcd, which was just
    started; return the revision after that.

    No executor of this launch has started yet, so every executor registered in this etcd was killed; its lease would
    block this launch until it expires.
    Raises: CoordinationError.
    """
    with EtcdClient(settings) as client:
        return max(
            client.delete(KeyRange.prefix(keys.directory(name))).revision
            for name in ("hosts", "status", "driver", "problems")
        )


def _exit_code(settings: EtcdSettings, keys: JobKeys, began: int, codes: list[int], *, is_asked: bool) -> int:
    """Return the job's exit code: that of the driver's record after revision `began`, else one from the hosts' exit
    codes.

    `is_asked`: the hosts were asked to stop, perhaps before they could handle the signal.
    """
    with suppress(CoordinationError), EtcdClient(settings) as client:
        item = client.get(keys.end)
        # hosts that failed before they took part leave the end record of the earlier launch in place
        if item is not None and item.mod_revision > began:
            return decode(JobEnd, item.value, keys.end).exit_code
    if ExitCode.OK in codes:  # etcd is gone now, but a host has read the end record
        return ExitCode.OK
    if is_asked and all(code in (-signal.SIGTERM, ExitCode.SAVED_AND_STOPPED) for code in codes):
        return ExitCode.SAVED_AND_STOPPED
    error_codes = [code for code in codes if code > 0]
    return max(error_codes) if error_codes else int(ExitCode.FAILURE)


@contextmanager
def _without_leftovers(plan: LaunchPlan, report: Callable[[str], None]) -> Iterator[Callable[[int], int]]:
    """After the block, remove the job's black boxes and, if everything is saved, its snapshots from memory.

    Yields a function that the block calls with the exit code.
    """
    codes: list[int] = []

    def record_code(code: int) -> int:
        codes.append(code)
        return code

    run = RunDirectory(plan.files.run)
    try:
        yield record_code
    finally:
        if run.holder() is None:  # else a job with another etcd trains in this run, and kept this launch out
            is_saved = bool(codes) and codes[0] in GOOD_ENDS
            _remove_leftovers(plan, run, report, is_saved=is_saved)


def _remove_leftovers(plan: LaunchPlan, run: RunDirectory, report: Callable[[str], None], *, is_saved: bool) -> None:
    remove_black_boxes(plan.config, run)
    if is_saved:
        left = release_snapshots(plan.config, run, report=report)
    else:
        left = [arena.root for arena in find_snapshots(plan.config, run)]
    if left:
        report(
            f"snapshots of the last steps stay in {', '.join(map(str, left))} for checkpoint.keep_arena_s="
            f"{plan.config.checkpoint.keep_arena_s:g} s; a launch within that time resumes from them"
        )

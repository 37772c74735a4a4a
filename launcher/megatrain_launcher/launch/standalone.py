"""A whole job on one machine by one command: an etcd of its own, daemon and page where installed, and executors.

One host is an executor in this process; several hosts are processes of their own (hosts.local). When the block of
contexts is left, for whatever reason, no executor, worker or etcd is left; nor anything in memory, once all is saved.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from megatrain.commands.etcd_flags import etcd_words, without_password
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.contracts.rounds import JobEnd
from megatrain.contracts.run_directory import RunDirectory
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain.coordination.wire import KeyRange
from megatrain.programs.stop_signals import StopSignals
from megatrain_launcher.etcd_process import EtcdProcess
from megatrain_launcher.executor.dashboard_notice import told_dashboard
from megatrain_launcher.executor.job_programs import ProgramSettings, running_programs
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.hosts.local import LocalHosts
from megatrain_launcher.launch.etcd_notice import told_troubles
from megatrain_launcher.launch.leftovers import find_snapshots, release_snapshots, remove_black_boxes
from megatrain_launcher.launch.plan import LaunchPlan
from megatrain_launcher.launch.templates import launch_words

Execute = Callable[[ExecutorSettings], int]
_LOOPBACK = "127.0.0.1"


def run_standalone(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    execute: Execute,
    tell: Callable[[str], None],
    on_job_over: Callable[[], None] = lambda: None,
) -> int:
    """Run the job and return its exit code. Raises: MegatrainError; KeyboardInterrupt when it was ended by force."""
    keys, launch_id = JobKeys(plan.config.job.name), secrets.token_hex(8)
    environment = without_password(environment)  # of another etcd
    # in this order: whoever does not get the directory has nothing of it to take away
    with (
        EtcdProcess(plan.files.directory, plan.files.credentials()) as etcd,
        plan.files.telling_end() as told,
        _without_leftovers(plan, tell) as note,
    ):
        settings = etcd.settings
        began = forget_dead_hosts(settings, keys)
        with ExitStack() as stack:
            stack.enter_context(plan.files.published(etcd, keys.job, launch_id))
            stack.enter_context(told_troubles(etcd, keys))
            if plan.flags.is_daemon_candidate:  # here, and not on a host: it outlives them all
                programs = ProgramSettings(plan.config, plan.files.run, settings, environment)
                stack.enter_context(told_dashboard(settings, keys, tell))
                stack.enter_context(running_programs(programs, tell))
            if plan.total_hosts == 1:
                own = plan.executor_settings(settings, environment, launch_id=launch_id, address=_LOOPBACK)
                return note(told(execute(replace(own, is_daemon_candidate=False))))
            flags = replace(plan.flags, is_daemon_candidate=False)
            words = [*etcd_words(settings), f"--launch-id={launch_id}", f"--local-addr={_LOOPBACK}",
                     "--platform=local", *launch_words(flags, plan.max_hosts)]  # fmt: skip
            with LocalHosts(words, plan.total_hosts, environment, tell) as hosts:

                def ask(signal_name: str) -> None:
                    hosts.stop()
                    tell(f"{signal_name}: the hosts save and stop (a second Ctrl-C ends them without)")

                with StopSignals(ask) as stop:
                    codes = hosts.wait()
                    on_job_over()
            return note(told(_exit_code(settings, keys, began, codes, is_asked=stop.is_requested)))


def forget_dead_hosts(settings: EtcdSettings, keys: JobKeys) -> int:
    """Remove what hosts of an earlier launch left in an etcd of the job's own that has just been started; return the
    newest revision that is of then.

    No process could reach it since, so every executor registered in it was killed; its lease would block this launch
    for a while.
    Raises: CoordinationError.
    """
    with EtcdClient(settings) as client:
        return max(
            client.delete(KeyRange.prefix(keys.directory(name))).revision
            for name in ("hosts", "status", "driver", "troubles")
        )


def _exit_code(settings: EtcdSettings, keys: JobKeys, began: int, codes: list[int], *, is_asked: bool) -> int:
    """Return how the job ended: as the driver wrote after revision `began`, else as the hosts did.

    `is_asked`: they were asked to stop, perhaps before they could handle it.
    """
    with suppress(CoordinationError), EtcdClient(settings) as client:
        item = client.get(keys.end)
        # hosts that failed before they took part leave the end of the launch before
        if item is not None and item.mod_revision > began:
            return decode(JobEnd, item.value, keys.end).exit_code
    if ExitCode.OK in codes:  # a host knows the end from etcd, which is gone now
        return ExitCode.OK
    if is_asked and all(code in (-signal.SIGTERM, ExitCode.SAVED_AND_STOPPED) for code in codes):
        return ExitCode.SAVED_AND_STOPPED
    told = [code for code in codes if code > 0]
    return max(told) if told else int(ExitCode.FAILURE)


@contextmanager
def _without_leftovers(plan: LaunchPlan, tell: Callable[[str], None]) -> Iterator[Callable[[int], int]]:
    """Take away what the job leaves in memory; the block passes its exit code through what it is given."""
    codes: list[int] = []

    def note(code: int) -> int:
        codes.append(code)
        return code

    run = RunDirectory(plan.files.run)
    try:
        yield note
    finally:
        if run.holder() is None:  # else a job that has its etcd elsewhere trains in this run, and kept us out
            is_saved = bool(codes) and codes[0] in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED)
            _remove_leftovers(plan, run, tell, is_saved=is_saved)


def _remove_leftovers(plan: LaunchPlan, run: RunDirectory, tell: Callable[[str], None], *, is_saved: bool) -> None:
    remove_black_boxes(plan.config, run)
    if is_saved:
        left = release_snapshots(plan.config, run, tell=tell)
    else:
        left = [arena.root for arena in find_snapshots(plan.config, run)]
    if left:
        tell(
            f"snapshots of the last steps stay in {', '.join(map(str, left))} for checkpoint.keep_arena_s="
            f"{plan.config.checkpoint.keep_arena_s:g} s; a launch within that time goes on from them"
        )

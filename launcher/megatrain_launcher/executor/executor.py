"""The executor: creates and connects its parts (lease, orders, workers, round follower, driver) and ends them.

`run_executor` returns the job's exit code. When it returns or raises, no worker, no standby server and no black box of
a finished round is left. The agent runs in the calling thread, all other parts in separate threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import ROUND_COUNTER_VARIABLE
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.host_records import HangEvidence, HostStatus
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.programs.stop_signals import StopSignals
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_launcher.agent import AgentSettings, RoundAgent
from megatrain_launcher.executor.check_queue import CheckQueue, HealthChecks
from megatrain_launcher.executor.crash_evidence import CrashEvidence
from megatrain_launcher.executor.driver_thread import DriverThread, RunDriver, driver_of
from megatrain_launcher.executor.executor_control import ExecutorControl, ExecutorControlParts
from megatrain_launcher.executor.host_checks import HostChecks
from megatrain_launcher.executor.host_program import start_host_programs
from megatrain_launcher.executor.job_programs import ProgramSettings
from megatrain_launcher.executor.job_record import leaving_error
from megatrain_launcher.executor.joining import JoinedHost, LocalParts, join_job
from megatrain_launcher.executor.membership import Membership
from megatrain_launcher.executor.order_state import OrderState
from megatrain_launcher.executor.program_runner import ProgramRunner, start_program_runner
from megatrain_launcher.executor.round_follower import FollowerParts, RoundFollower
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.executor.status_writer import StatusWriter
from megatrain_launcher.executor.storage_watch import StorageWatch
from megatrain_launcher.executor.worker_events import WorkerEvents
from megatrain_launcher.health.kernel_log import recent_gpu_errors
from megatrain_launcher.liveness import OrderDelivery, unfit_after_s

_logger = logging.getLogger(__name__)

MakeChecks = Callable[[ExecutorSettings, EtcdClient, JobKeys], HealthChecks]
MakeDriver = Callable[
    [ExecutorSettings, EtcdClient, JobKeys, Callable[[], LeaseKeeper], threading.Event, Callable[[], bool]], RunDriver
]


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """The factories of an executor's health checks and driver; tests replace them."""

    make_checks: MakeChecks = HostChecks
    make_driver: MakeDriver = driver_of


def run_executor(settings: ExecutorSettings, parts: ExecutorParts | None = None) -> int:
    """Take part in the job until it ends, and return the job's exit code.

    Raises: ConfigError or CoordinationError when this host cannot take part, or must leave.
    """
    with ExitStack() as closing:
        signals = closing.enter_context(StopSignals())
        client = closing.enter_context(EtcdClient(settings.etcd))
        try:
            joined = join_job(settings, client, closing)
            return _run_parts(settings, parts or ExecutorParts(), client, joined, signals)
        except CoordinationError as error:
            raise leaving_error(settings.host, error) from error


def _run_parts(
    settings: ExecutorSettings, parts: ExecutorParts, client: EtcdClient, joined: JoinedHost, signals: StopSignals
) -> int:
    """Start the threads, run the agent until the job is over, end the threads."""
    local, orders, membership = joined.local, joined.orders, joined.membership
    leading = threading.Event()
    with ExitStack() as closing:
        runner = _start_programs(settings, client, joined, leading)
        if runner is not None:
            closing.callback(runner.close)  # closed after the streamer, whose last messages go to the daemon
        programs = start_host_programs(settings)
        for program in programs:
            closing.callback(program.close)
        storage = StorageWatch(settings.config, settings.run_directory, settings.host, local.wakers.wake)
        closing.callback(storage.close)
        driver = _start_driver(settings, parts, client, joined, leading)
        if driver is not None:
            closing.callback(driver.close)

        def status() -> HostStatus:
            view = orders.view()
            problems = (orders.problem, membership.problem, local.standby.problem, local.logs.problem)
            more = (
                local.crash.box_paths.problem,
                *(thread.problem for thread in (driver, runner) if thread is not None),
            )
            problem = "; ".join(
                problem for problem in (*problems, *more, *(program.problem for program in programs)) if problem
            )
            host_status = local.state.status(membership.session, view, problem)
            is_streamed = any(program.is_supervised for program in programs)
            return replace(host_status, is_streamed=is_streamed, saves=storage.view.saves, disks=storage.view.disks)

        writer = StatusWriter(client, joined.keys, membership, status, settings.config.recovery.status_interval_s)
        closing.callback(writer.close)
        check_queue = _start_check_queue(settings, parts, client, joined, writer)
        closing.callback(check_queue.close)
        follower = _start_follower(settings, joined, writer, check_queue)
        closing.callback(follower.close)
        rounds = RoundAgent(
            _agent_settings(settings, local, client.gateway.cluster_id),
            orders,
            WorkerEvents(settings.host, local.state, local.crash, lambda: membership.session),
            local.standby,
            local.logs,
        )
        control = ExecutorControl(
            ExecutorControlParts(
                client=client,
                keys=joined.keys,
                host=settings.host,
                orders=orders,
                membership=membership,
                liveness=local.liveness,
                state=local.state,
                delivery=OrderDelivery(unfit_after_s(settings.config.recovery.lease_ttl_s)),
                on_stop=rounds.wake,
            )
        )
        closing.callback(control.close)
        local.wakers.all += [writer.wake, rounds.wake, follower.wake, control.wake]
        signals.set_callbacks(
            lambda name: control.stop(f"it received {name}"), lambda name: control.kill(f"it received {name} again")
        )
        orders.follow(client)
        rounds.run()
        return _exit_code(orders, control, membership)


def _exit_code(orders: OrderState, control: ExecutorControl, membership: Membership) -> int:
    """Return the executor's exit code after its agent returned. Raises: CoordinationError if it was replaced."""
    end = orders.view().end
    if end is not None:
        _logger.info("the job is over: %s", end.reason)
        return end.exit_code
    if membership.replaced:
        raise CoordinationError(membership.replaced)
    if control.was_killed or not control.stop_reason:
        return ExitCode.FAILURE
    return ExitCode.SAVED_AND_STOPPED


def _start_driver(
    settings: ExecutorSettings, parts: ExecutorParts, client: EtcdClient, joined: JoinedHost, leading: threading.Event
) -> DriverThread | None:
    if not settings.is_driver_candidate:
        return None
    membership, state, orders = joined.membership, joined.local.state, joined.orders

    def is_driver_suspected() -> bool:
        """Return whether a worker of the newest round failed here and no halt followed: the driver may be dead."""
        number = state.failed_round()
        return number > 0 and not orders.is_halted(number)

    run_driver = parts.make_driver(
        settings, client, joined.keys, lambda: membership.keeper, leading, is_driver_suspected
    )
    return DriverThread(run_driver)


def _start_programs(
    settings: ExecutorSettings, client: EtcdClient, joined: JoinedHost, leading: threading.Event
) -> ProgramRunner | None:
    if not settings.is_daemon_candidate:
        return None
    run = settings.run_directory.root.absolute()
    programs = ProgramSettings(settings.config, run, settings.etcd, settings.environment)
    return start_program_runner(programs, settings.host, client, joined.record, leading)


def _start_check_queue(
    settings: ExecutorSettings, parts: ExecutorParts, client: EtcdClient, joined: JoinedHost, writer: StatusWriter
) -> CheckQueue:
    state = joined.local.state
    checks = parts.make_checks(settings, client, joined.keys)
    check_queue = CheckQueue(checks, joined.membership, writer.add_report, lambda: state.running() is not None)
    if settings.config.recovery.has_health_checks:
        check_queue.check_before_joining()
    return check_queue


def _start_follower(
    settings: ExecutorSettings, joined: JoinedHost, writer: StatusWriter, check_queue: CheckQueue
) -> RoundFollower:
    has_gpus = settings.config.runtime.device != "cpu"
    parts = FollowerParts(
        host=settings.host,
        state=joined.local.state,
        orders=joined.orders,
        membership=joined.membership,
        box_paths=joined.local.crash.box_paths,
        phase_timeouts=settings.config.phase_timeouts,
        fence_rule=settings.config.fence_rule,
        recording=DiagSettings(sample_period=settings.config.diagnostics.sample_period),
        publish=partial(_publish, writer, joined.local.crash),
        gpu_errors=partial(recent_gpu_errors, settings.places.kernel_log) if has_gpus else lambda: (),
        check=check_queue.obey,
    )
    return RoundFollower(parts, joined.seen_command)


def _publish(writer: StatusWriter, crash: CrashEvidence, evidence: HangEvidence) -> None:
    """Publish the evidence to the driver, and keep a copy in the run directory."""
    writer.add_evidence(evidence)
    crash.keep_positions(evidence)


def _agent_settings(settings: ExecutorSettings, local: LocalParts, cluster_id: str) -> AgentSettings:
    return AgentSettings(
        job=settings.config.job.name,
        module=settings.module,
        arguments=tuple(settings.arguments),
        environment={**local.environment, ROUND_COUNTER_VARIABLE: cluster_id},
        directory=Path.cwd(),
        save_grace_s=settings.config.runtime.save_grace_s,
    )

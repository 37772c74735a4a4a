"""Runs one host's part of a launch: alone, with an etcd of the launch's own, or together with other machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.exit_codes import GOOD_ENDS
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.etcd.process import EtcdProcess
from megatrain_launcher.health.kernel_log import read_kernel_log
from megatrain_launcher.hosts.address import interface_address, resolve
from megatrain_launcher.launch.etcd_notice import published_problems
from megatrain_launcher.launch.job_files import why_not_written
from megatrain_launcher.launch.plan import LaunchPlan
from megatrain_launcher.launch.standalone import Execute, forget_dead_hosts, run_standalone
from megatrain_launcher.leftovers import release_snapshots

_LEFT_POLL_S = 0.25
_LEAVE_S = 15.0


def run_launch(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    execute: Execute,
    report: Callable[[str], None],
    on_job_over: Callable[[], None] = lambda: None,
) -> int:
    """Start the programs of the plan and return the job's exit code. Raises: MegatrainError, KeyboardInterrupt.

    `on_job_over`: called when the last of several executors has ended, before anything is cleaned up.
    """
    report = _ignoring_closed_output(report)
    for note in plan.notes():
        report(note)
    _check_kernel_log(plan.flags.kernel_log)
    if plan.is_alone:
        _check_logs(plan)
        return run_standalone(plan, environment, execute, report, on_job_over)
    with _reached_etcd(plan, environment) as etcd:
        _check_logs(plan)
        launch_id = plan.flags.launch_id or plan.facts.launch_id
        settings = plan.executor_settings(etcd, environment, launch_id=launch_id, address=plan.address(etcd))
        code = execute(settings)
        if code in GOOD_ENDS:
            if plan.platform.name == "slurm":
                plan.files.write_exit_code(code)
            _remove_snapshots(plan, report)
        return code


def _remove_snapshots(plan: LaunchPlan, report: Callable[[str], None]) -> None:
    """Remove this host's snapshots: everything is saved, so no round resumes from them."""
    left = release_snapshots(plan.config, RunDirectory(plan.files.run), plan.facts.host, report)
    if left:
        report(f"snapshots stay in {', '.join(map(str, left))}: their writer has not finished")


def _check_logs(plan: LaunchPlan) -> None:
    """Raise ConfigError if the ranks' logs cannot be written."""
    log_dir = plan.flags.log_dir
    directory = Path(log_dir) if log_dir else RunDirectory(plan.files.run).logs
    why_not = why_not_written(directory)
    if why_not:
        option, hint = f"--log-dir={log_dir}", "name another directory"
        if not log_dir:
            option, hint = f"{directory}", "set job.run_directory to a directory that you may write to"
        raise ConfigError([f"{option}: {why_not}, and the ranks' logs go there; {hint}"])


def _check_kernel_log(path: str) -> None:
    """Raise ConfigError if the kernel log at `path` cannot be read. If `path` is empty, nothing is checked."""
    if not path:
        return
    try:
        read_kernel_log(Path(path))
    except OSError as error:
        problem = (
            f"--kernel-log={path}: cannot be read ({error.strerror}), and errors of GPUs are read there; mount the "
            "host's /dev/kmsg or a copy at this path, or leave the option out"
        )
        raise ConfigError([problem]) from None


def _ignoring_closed_output(report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a `report` that ignores the errors of a closed output, such as a terminal that is gone."""

    def report_if_open(text: str) -> None:
        with suppress(OSError):
            report(text)

    return report_if_open


@contextmanager
def _reached_etcd(plan: LaunchPlan, environment: Mapping[str, str]) -> Iterator[EtcdSettings]:
    """Provide an etcd that all hosts reach: the named etcd, else that of the first host.

    Raises: ConfigError when no etcd is named, unless the platform is Slurm, which determines the first host.
    """
    if plan.flags.etcd.endpoints:
        yield plan.flags.etcd.settings(environment)
        return
    if plan.platform.name != "slurm":
        problem = (
            f"--nnodes={plan.min_hosts}:{plan.max_hosts} without --rdzv-endpoint: hosts find each other through etcd; "
            "name its members with --rdzv-endpoint=HOST:PORT, or add --standalone to have all hosts on this machine"
        )
        raise ConfigError([problem])
    launch_id = plan.flags.launch_id or plan.facts.launch_id
    if plan.facts.index != 0:
        yield plan.files.wait_for_endpoint(launch_id, plan.config.recovery.join_timeout_s)
        return
    with ExitStack() as stack:
        files = plan.files
        etcd = stack.enter_context(
            EtcdProcess(files.directory, files.credentials(), address=_listen_address(plan), tls=files.tls)
        )
        keys = JobKeys(plan.config.job.name)
        forget_dead_hosts(etcd.settings, keys)
        stack.enter_context(files.published(etcd, keys.job, launch_id))
        stack.enter_context(published_problems(etcd, keys))
        yield etcd.settings
        _wait_until_alone(etcd.settings, keys)


def _listen_address(plan: LaunchPlan) -> str:
    """Return the IP address that the first host's etcd listens on. Raises: ConfigError."""
    if plan.config.runtime.network_interface and not plan.flags.local_addr:
        return interface_address(plan.config.runtime.network_interface)
    name = plan.flags.local_addr or plan.facts.address
    address = resolve(name)
    if not address:
        raise ConfigError(
            [(f"{name}: the other hosts cannot reach this one by that name; give --local-addr=ADDRESS, set "
             "runtime.network_interface, or name an etcd with --rdzv-endpoint=HOST:PORT")]
        )  # fmt: skip
    return address


def _wait_until_alone(settings: EtcdSettings, keys: JobKeys) -> None:
    """Keep etcd running until the other hosts have read the job's end and left, for at most _LEAVE_S seconds."""
    deadline = time.monotonic() + _LEAVE_S
    with suppress(CoordinationError), EtcdClient(settings) as client:
        while time.monotonic() < deadline:
            if not client.read_all(KeyRange.prefix(keys.directory("hosts")), has_values=False).items:
                return
            time.sleep(_LEFT_POLL_S)

"""Finds the job that a command line names: by a run directory, or by a job's name and etcd's address.

A job that has its own etcd (`megatrain launch --standalone`) writes its address to <run>/coordination/endpoint. So
`megatrain status runs/demo`, or `demo`, is enough. A password never comes from the command line. Without
--rdzv-endpoint, the address, the password and the certificate come only from the run directory.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megatrain.commands.argument_types import utf8_text
from megatrain.contracts.errors import (
    ConfigError,
    CoordinationError,
    CoordinationRefusedError,
    DataError,
    UsageError,
)
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.job_keys import ROOT, JobKeys
from megatrain.formatting import names_text
from megatrain_job.commands.etcd_flags import EtcdFlags, add_etcd_arguments, etcd_flags
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange, Range
from megatrain_job.jobs.own_etcd import ENDPOINT_FILE, OwnEtcd, read_job, read_own_etcd
from megatrain_job.jobs.run_state import recorded_exit_code

Answer = TypeVar("Answer")
RUNS = Path("runs")
_JOB_HELP = "a run directory or a job's name (default: the only job found)"
_ATTEMPT_S = 2.0
_CALL_S = 4.0
_MAX_JOBS = 1000
_OWN_CALL_S = 1.0
"""A job's own etcd has only one member: if this member does not answer within this time, the etcd is not running."""


class JobLocationError(UsageError):
    """The command line does not identify the job or its etcd."""


class MissingJobLocationError(JobLocationError):
    """The named run or job does not exist, or its etcd's address is unknown."""

    exit_code = ExitCode.NOT_FOUND


class ForeignRunError(JobLocationError):
    """The run belongs to another user."""

    exit_code = ExitCode.NO_PERMISSION


class DamagedJobLocationError(JobLocationError):
    """The run's record of its etcd cannot be parsed, or names files or addresses that cannot be used."""

    exit_code = ExitCode.DATA


@dataclass(frozen=True, slots=True)
class JobLocation:
    """The location of a job's keys. `job` is empty if the command line means the only job at these endpoints."""

    settings: EtcdSettings
    job: str
    run_directory: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job, and a client that reaches its etcd."""

    client: EtcdClient
    keys: JobKeys
    run_directory: Path | None = None


def add_job(parser: argparse.ArgumentParser, *, job_help: str = _JOB_HELP) -> None:
    """Declare [JOB] and etcd's options."""
    parser.add_argument("job", nargs="?", default="", type=utf8_text, metavar="JOB", help=job_help)
    parser.add_argument("--job", dest="job_option", default="", type=utf8_text, metavar="JOB", help="the same as JOB")
    add_etcd_arguments(parser)


def named_job(args: argparse.Namespace) -> str:
    """Return the job from JOB or --job. Raises: JobLocationError when both are given and differ."""
    job: str = args.job
    option: str = args.job_option
    if job and option and job != option:
        raise JobLocationError(f"JOB is {job!r} and --job={option}: two jobs; give one of them")
    return job or option


@contextmanager
def opened_job(args: argparse.Namespace, *, is_patient: bool = False, call_s: float | None = None) -> Iterator[OpenJob]:
    """Open a client for the job that the command line means.

    is_patient: use the client's default time limits instead of short ones. call_s: time limit of a call in seconds; it
    overrides both.
    Raises: JobLocationError when the command line identifies no job; CoordinationError when its etcd cannot be reached.
    """
    location = job_location(args)
    limits = EtcdSettings(location.settings.endpoints) if is_patient else location.settings
    settings = replace(location.settings, attempt_s=limits.attempt_s, call_s=limits.call_s)
    if call_s is not None:
        settings = _with_call_limit(settings, call_s)
    with _quiet(), EtcdClient(settings) as client:
        try:
            yield OpenJob(client, JobKeys(location.job or _only_job(client)), location.run_directory)
        except CoordinationError as error:
            is_unreachable = bool(error.endpoints) and not isinstance(error, CoordinationRefusedError)
            if location.run_directory is None or not is_unreachable:
                raise
            run = shlex.quote(str(location.run_directory))
            raise CoordinationError(
                f"the job of {run} is not running, or its etcd is out of reach: {error}\n"
                f"`megatrain incidents {run}` shows what was recorded on disk",
                endpoints=error.endpoints,
                key=error.key,
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client's log off the terminal: errors contain the relevant part, and log lines garble a live view."""
    logger, handler = logging.getLogger("megatrain_job.coordination"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def job_location(args: argparse.Namespace) -> JobLocation:
    """Return the location of the job's keys. Raises: JobLocationError naming what is missing."""
    given_name = named_job(args)
    run = run_directory(given_name)
    try:
        flags = etcd_flags(args)
        reached = flags.settings(os.environ) if flags.endpoints else None
    except ConfigError as error:
        raise JobLocationError("; ".join(error.problems)) from error
    if reached is not None:
        job = given_name if run is None else _read_record(run, read_job)
        _check_name(job)
        return JobLocation(_with_call_limit(reached, _CALL_S), job, run)
    if run is None and given_name:
        raise MissingJobLocationError(
            f"job {given_name!r}: no run directory of that name (looked for {RUNS / given_name / ENDPOINT_FILE}); "
            "give etcd's address with --rdzv-endpoint HOST:PORT, or name the run directory"
        )
    run = run or _only_run()
    if flags != EtcdFlags():
        raise JobLocationError(
            f"{run} has the address, user, password and certificate of its etcd; --etcd-* and --rdzv-conf apply only "
            "to the etcd of --rdzv-endpoint: give that too, or none of them"
        )
    own_etcd: OwnEtcd = _read_record(run, read_own_etcd)
    _check_name(own_etcd.job)
    return JobLocation(_with_call_limit(own_etcd.settings, _OWN_CALL_S), own_etcd.job, run)


def run_directory(text: str) -> Path | None:
    """Return the run directory that JOB means: JOB itself, or runs/JOB; None if JOB is only a job's name."""
    if not text:
        return None
    direct = Path(text)
    if os.path.lexists(direct / ENDPOINT_FILE):
        return direct
    usual = RUNS / text
    if "/" not in text and os.path.lexists(usual / ENDPOINT_FILE):
        return usual
    return direct if "/" in text or text in (".", "..") else None


def run_at(text: str) -> Path | None:
    """Return the existing directory that JOB means, even if its job is not running; None if there is none."""
    for path in (Path(text), RUNS / text) if text else ():
        if path.is_dir():
            return path
    return None


def _read_record(run: Path, read: Callable[[Path], Answer]) -> Answer:
    """Read a run directory's record of its etcd with `read`. Raises: JobLocationError."""
    try:
        return read(run)
    except FileNotFoundError as error:
        if os.path.lexists(run / ENDPOINT_FILE):
            raise MissingJobLocationError(
                f"{error.filename}: no such file; give --rdzv-endpoint HOST:PORT instead"
            ) from error
        raise MissingJobLocationError(f"{run}: {_why_no_etcd_is_named(run)}") from None
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise ForeignRunError(
            f"{problem}; only the user who launched a job can reach its etcd through its run directory"
        ) from error
    except (DataError, ConfigError) as error:
        raise DamagedJobLocationError(str(error)) from error


def _why_no_etcd_is_named(run: Path) -> str:
    code = recorded_exit_code(run)
    if code is not None:
        name = shlex.quote(str(run))
        return (
            f"its last job ended with exit code {code}; `megatrain dashboard --replay {name}` shows its history, and "
            f"`megatrain incidents {name}` its failures"
        )
    return (
        f"no {ENDPOINT_FILE} there, so no job with its own etcd runs in it; for a job that was launched with "
        "--rdzv-endpoint, give the same option here, with the job's name"
    )


def _only_run() -> Path:
    found = sorted(path.parent.parent for path in RUNS.glob(f"*/{ENDPOINT_FILE}"))
    if not found:
        raise MissingJobLocationError(
            f"no job is named, and no run below {RUNS}/ has its own etcd; name a run directory, "
            "or give --rdzv-endpoint HOST:PORT and the job's name"
        )
    if len(found) > 1:
        raise JobLocationError(
            f"no job is named, and there are {names_text([str(path) for path in found])}; name one of them"
        )
    return found[0]


def _only_job(client: EtcdClient) -> str:
    try:
        found = list_jobs(client)
    except CoordinationRefusedError as error:
        raise CoordinationRefusedError(
            f"{error}; name the job, so that only its keys are read", key=error.key
        ) from error
    where = names_text([str(endpoint) for endpoint in client.settings.endpoints])
    if not found:
        raise MissingJobLocationError(f"etcd at {where} has no job; start one with `megatrain launch`")
    if len(found) > 1:
        raise JobLocationError(f"no job is named, and etcd at {where} has {names_text(found)}; name one of them")
    return found[0]


def list_jobs(client: EtcdClient) -> tuple[str, ...]:
    """Return the names of the jobs that have a record in this etcd, at most 1,000. Raises: CoordinationError."""
    names: list[str] = []
    end = KeyRange.prefix(ROOT).end
    start = ROOT.encode()
    while len(names) < _MAX_JOBS:
        items = client.read(Range(KeyRange(start, end), limit=1, has_values=False)).items
        if not items:
            break
        name = items[0].key.removeprefix(ROOT.encode()).partition(b"/")[0]
        keys = JobKeys(name.decode(errors="replace"))
        if client.read(Range(KeyRange.key(keys.record), has_values=False)).items:
            names.append(keys.job)
        start = ROOT.encode() + name + b"0"  # the character after the slash
    return tuple(sorted(names, key=natural_order))


def _check_name(job: str) -> None:
    if "/" in job:
        raise MissingJobLocationError(f"job {job!r}: neither a run directory nor a job's name, which has no slash")


def _with_call_limit(settings: EtcdSettings, call_s: float) -> EtcdSettings:
    return replace(settings, attempt_s=min(_ATTEMPT_S, call_s), call_s=call_s)

"""Which job a command line means: a run directory, or a job's name and where etcd is.

A job that has its own etcd (`megatrain launch --standalone`) says in <run>/coordination/endpoint where that is, so that
`megatrain status runs/demo`, or `demo`, is all that anybody has to write. A password never comes from the command line.
Where a file says where etcd is, none comes from the environment either, and no certificate: the run has its own.
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
from megatrain.commands.etcd_flags import EtcdFlags, add_etcd_arguments, etcd_flags
from megatrain.contracts.errors import (
    ConfigError,
    CoordinationError,
    CoordinationRefusedError,
    DataError,
    UsageError,
)
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.job_keys import ROOT, JobKeys
from megatrain.contracts.texts import names_text, natural_order
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain.coordination.wire import KeyRange, Range
from megatrain.jobs.own_etcd import ENDPOINT_FILE, OwnEtcd, read_job, read_own_etcd
from megatrain.jobs.run_standing import recorded_exit_code

Answer = TypeVar("Answer")
RUNS = Path("runs")
_JOB_HELP = "a run directory or a job's name (default: the only job that there is)"
_ATTEMPT_S = 2.0
_CALL_S = 4.0
_MAX_JOBS = 1000
_OWN_CALL_S = 1.0
"""A job's own etcd has one member, on this machine: when it does not answer at once, it is not there."""


class PlaceError(UsageError):
    """The command line does not say which job is meant, or where its etcd is."""


class NoPlaceError(PlaceError):
    """The run or job that the command line names is not there, or nothing tells where its etcd is."""

    exit_code = ExitCode.NOT_FOUND


class ClosedPlaceError(PlaceError):
    """The run is another user's."""

    exit_code = ExitCode.NO_PERMISSION


class DamagedPlaceError(PlaceError):
    """What a run says of its etcd cannot be read."""

    exit_code = ExitCode.DATA


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where the keys of a job are. `job` is empty where the only one at these endpoints is meant."""

    settings: EtcdSettings
    job: str
    run_directory: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job, and a client that reaches its etcd."""

    client: EtcdClient
    keys: JobKeys
    run_directory: Path | None = None


def add_job(parser: argparse.ArgumentParser, *, former_option: str = "", job_help: str = _JOB_HELP) -> None:
    """Declare [JOB], and where etcd is. `former_option`: how that is written now which once stood in its place."""
    parser.set_defaults(former_option=former_option)
    parser.add_argument("job", nargs="?", default="", type=utf8_text, metavar="JOB", help=job_help)
    parser.add_argument("--job", dest="job_option", default="", type=utf8_text, metavar="JOB", help="the same as JOB")
    add_etcd_arguments(parser)


def told_job(args: argparse.Namespace) -> str:
    """Return what the command line says of the job, in either spelling. Raises: PlaceError where they differ."""
    job: str = args.job
    option: str = args.job_option
    if job and option and job != option:
        raise PlaceError(f"JOB is {job!r} and --job={option}: two jobs; give one of them{former_word(args, job)}")
    return job or option


def former_word(args: argparse.Namespace, word: str = "") -> str:
    """Return what a word that stands for the job is now written as, where it stood for something else once."""
    word = word or args.job
    if not word or not args.former_option:
        return ""
    return f" ({args.former_option[2:]} {word!r} is now written {args.former_option} {word})"


@contextmanager
def opened_job(args: argparse.Namespace, *, is_patient: bool = False, call_s: float | None = None) -> Iterator[OpenJob]:
    """Have a client for the job that the command line means. `is_patient`: with the client's usual time limits.

    `call_s`: the longest that a call may take.

    Raises: PlaceError where it means none; CoordinationError where its etcd is out of reach.
    """
    place = job_place(args)
    limits = EtcdSettings(place.settings.endpoints) if is_patient else place.settings
    settings = replace(place.settings, attempt_s=limits.attempt_s, call_s=limits.call_s)
    if call_s is not None:
        settings = _hasty(settings, call_s)
    with _quiet(), EtcdClient(settings) as client:
        try:
            yield OpenJob(client, JobKeys(place.job or _only_job(client)), place.run_directory)
        except CoordinationError as error:
            is_unreachable = bool(error.endpoints) and not isinstance(error, CoordinationRefusedError)
            if place.run_directory is None or not is_unreachable:
                raise
            run = shlex.quote(str(place.run_directory))
            raise CoordinationError(
                f"the job of {run} does not run, or its etcd is out of reach: {error}\n"
                f"`megatrain incidents {run}` reads what was recorded on disk",
                endpoints=error.endpoints,
                key=error.key,
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client's log off the terminal: what matters of it is in the errors, and drawings would be torn."""
    logger, handler = logging.getLogger("megatrain.coordination"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def job_place(args: argparse.Namespace) -> JobPlace:
    """Return where the keys of the job are. Raises: PlaceError naming what is missing."""
    told_name = told_job(args)
    run = run_directory(told_name)
    try:
        flags = etcd_flags(args)
        reached = flags.settings(os.environ) if flags.endpoints else None
    except ConfigError as error:
        raise PlaceError("; ".join(error.problems)) from error
    if reached is not None:
        job = told_name if run is None else _told(run, read_job)
        _check_name(job)
        return JobPlace(_hasty(reached, _CALL_S), job, run)
    if run is None and told_name:
        raise NoPlaceError(
            f"job {told_name!r}: no run directory of that name (looked for {RUNS / told_name / ENDPOINT_FILE}); "
            f"say where etcd is with --rdzv-endpoint HOST:PORT, or name the run directory{former_word(args, told_name)}"
        )
    run = run or _only_run()
    if flags != EtcdFlags():
        raise PlaceError(
            f"{run} says where its etcd is, and has the user, password and certificate for it; what --etcd-* and "
            "--rdzv-conf name is for the etcd of --rdzv-endpoint: give that too, or none of them"
        )
    told: OwnEtcd = _told(run, read_own_etcd)
    _check_name(told.job)
    return JobPlace(_hasty(told.settings, _OWN_CALL_S), told.job, run)


def run_directory(text: str) -> Path | None:
    """Return the run directory that JOB means: itself, or the usual one of a job; None where it is only a name."""
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
    """Return the run directory that JOB means, whether or not its job runs; None where there is none."""
    for path in (Path(text), RUNS / text) if text else ():
        if path.is_dir():
            return path
    return None


def _told(run: Path, read: Callable[[Path], Answer]) -> Answer:
    """Return what a file of a run directory tells of its etcd. Raises: PlaceError."""
    try:
        return read(run)
    except FileNotFoundError as error:
        if os.path.lexists(run / ENDPOINT_FILE):
            raise NoPlaceError(f"{error.filename}: no such file; say --rdzv-endpoint HOST:PORT instead") from error
        raise NoPlaceError(f"{run}: {_why_nothing_is_told(run)}") from None
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise ClosedPlaceError(f"{problem}; only who launched a job gets into its etcd by its run directory") from error
    except (DataError, ConfigError) as error:
        raise DamagedPlaceError(str(error)) from error


def _why_nothing_is_told(run: Path) -> str:
    code = recorded_exit_code(run)
    if code is not None:
        looks = f"megatrain incidents {shlex.quote(str(run))}"
        return f"its last job ended with exit code {code}; `{looks}` tells what went wrong in it"
    return (
        f"no {ENDPOINT_FILE} there, so no job with an etcd of its own runs in it; for one that was launched with "
        "--rdzv-endpoint say the same here, with the job's name"
    )


def _only_run() -> Path:
    found = sorted(path.parent.parent for path in RUNS.glob(f"*/{ENDPOINT_FILE}"))
    if not found:
        raise NoPlaceError(
            f"which job? None below {RUNS}/ has an etcd of its own; name a run directory, "
            "or say --rdzv-endpoint HOST:PORT and the job's name"
        )
    if len(found) > 1:
        raise PlaceError(f"which job? There are {names_text([str(path) for path in found])}; name one of them")
    return found[0]


def _only_job(client: EtcdClient) -> str:
    try:
        found = list_jobs(client)
    except CoordinationRefusedError as error:
        raise CoordinationRefusedError(f"{error}; name the job, to look at nothing else", key=error.key) from error
    where = names_text([str(endpoint) for endpoint in client.settings.endpoints])
    if not found:
        raise NoPlaceError(f"no job is known to etcd at {where}; start one with `megatrain launch`")
    if len(found) > 1:
        raise PlaceError(f"which job? etcd at {where} knows {names_text(found)}; name one of them")
    return found[0]


def list_jobs(client: EtcdClient) -> tuple[str, ...]:
    """Return the names of the jobs that one etcd has a record of. Raises: CoordinationError."""
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
        raise NoPlaceError(f"job {job!r}: neither a run directory nor a job's name, which has no slash")


def _hasty(settings: EtcdSettings, call_s: float) -> EtcdSettings:
    return replace(settings, attempt_s=min(_ATTEMPT_S, call_s), call_s=call_s)

"""Replaces the example names in runbooks (`runs/demo` or `my`, host-2, round 3) with a job's names. Pure functions.

An unknown name becomes a word in capitals, which no program accepts as a name, so that a copied example evicts no
host.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_RUN = r"(?:/data/)?runs/(?:demo|my)\b"
_ASKING = re.compile(rf"^(megatrain (?:status|incidents|driver|job \w+|host \w+)) (?:{_RUN}|my\b)(.*)$")
"""Subcommands that find a job in etcd. Other subcommands, and programs of the system, use its run directory."""
_ENDPOINT = r"\betcd-\d:2379\b"
_ENDPOINTS = rf"{_ENDPOINT}(?:,{_ENDPOINT})*"
_CODE_OF_JOB = re.compile(rf"^megatrain |{_RUN}|<run>|/megatrain/(?:my|<job>)/")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a job, and of the incident that is being handled."""

    job: str
    run: str
    """The absolute path of the run directory."""
    etcd: str = ""
    """The etcd endpoints for `--rdzv-endpoint`; empty where the run directory has them, or no etcd runs any more."""
    host: str = ""
    rank: int | None = None
    round: int | None = None
    step: int | None = None
    incident: str = ""
    verdict: str = ""


def filled_command(command: str, names: Names) -> str:
    """Return a command of a runbook with the names of a job filled in."""
    asking = _ASKING.match(command)
    if asking is not None:
        place = f"{shlex.quote(names.job)} --rdzv-endpoint {names.etcd}" if names.etcd else shlex.quote(names.run)
        rest = re.sub(rf" --rdzv-endpoint {_ENDPOINTS}", "", asking[2])
        command = f"{asking[1]} {place}{rest}"
    for pattern, value in _replacements(command, names):
        command = value.join(re.split(pattern, command))
    return command


def filled_code(code: str, names: Names) -> str:
    """Return a piece of inline code: with names filled in if it concerns a job, else unchanged."""
    return filled_command(code, names) if _CODE_OF_JOB.search(code) else code


def _replacements(command: str, names: Names) -> Iterator[tuple[str, str]]:
    """Yield pairs: a pattern of an example name, and the name of the job that replaces it."""
    run = shlex.quote(names.run)
    is_of_verdicts = command.startswith("megatrain diag verdicts")
    of_id = names.verdict or "VERDICT" if is_of_verdicts else names.incident or "last"
    yield r"\bmy\.toml\b", f"{run}/config.toml"
    yield rf"{_RUN}|<run>", run
    yield r"/megatrain/(?:my|<job>)/", f"/megatrain/{names.job}/"
    yield rf"http://{_ENDPOINT}", names.etcd.split(",")[0] or "http://HOST:PORT"
    yield _ENDPOINTS, names.etcd or "HOST:PORT"
    yield r"\bhost-\d+\b|\bHOST\b(?!:)", shlex.quote(names.host) if names.host else "HOST"
    yield r"\bround-(?:\d{6}|N)\b", "round-ROUND" if names.round is None else f"round-{names.round:06d}"
    yield r"\brank-\d{5}\b", "rank-RANK" if names.rank is None else f"rank-{names.rank:05d}"
    yield r"(?<=--id )\S+", of_id
    yield r"(?<=--verdict )\S+", names.verdict or "VERDICT"
    yield r"(?<=--step )\d+", "STEP" if names.step is None else str(names.step)
    # a reason goes into the audit, so the reason of the example must not be used
    yield r'(?<=--reason )"[^"]*"', '"WHY"'

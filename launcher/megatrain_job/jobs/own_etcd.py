"""The job's own etcd, as <run>/coordination describes it: where it is, and how its user authenticates.

endpoint          JSON: endpoints, job, launch_id; user if the etcd requires one. Exists while the etcd runs.
password          password of that user; created once
certificate.pem   if other hosts reach the etcd: its certificate, and the only one that it trusts; new at each launch
key.pem           key of the certificate

All four files must belong to the reading user, and no other user may be able to write them. Otherwise another user
could redirect the password to a server of their own. Only this run's password is ever sent.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.contracts.errors import ConfigError, DataError
from megatrain.contracts.files.bounded_files import read_below
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles

COORDINATION_DIRECTORY = "coordination"
ENDPOINT_FILE = f"{COORDINATION_DIRECTORY}/endpoint"
PASSWORD_FILE = f"{COORDINATION_DIRECTORY}/password"
CERTIFICATE_FILE = f"{COORDINATION_DIRECTORY}/certificate.pem"
KEY_FILE = f"{COORDINATION_DIRECTORY}/key.pem"
USER = "megatrain"
PASSWORD_BYTES = 24
_PASSWORD = re.compile(r"[A-Za-z0-9_-]{32}")
"""The form of secrets.token_urlsafe(PASSWORD_BYTES): other keys and passwords do not have it."""
_MAX_ENDPOINT_BYTES = 1 << 16
_MAX_SECRET_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class OwnEtcd:
    """A job's own etcd: the job and the launch, and the settings for clients."""

    job: str
    launch_id: str
    settings: EtcdSettings


def endpoint_text(settings: EtcdSettings, job: str, launch_id: str) -> str:
    """Return the text that `read_own_etcd` reads."""
    content = {"endpoints": [str(endpoint) for endpoint in settings.endpoints], "job": job, "launch_id": launch_id}
    if settings.credentials is not None:
        content["user"] = settings.credentials.user
    return json.dumps(content) + "\n"


def read_own_etcd(run: Path) -> OwnEtcd:
    """Return the etcd that a run directory names.

    Raises: FileNotFoundError if it names none; OSError naming the file and the problem; DataError for a malformed file;
    ConfigError for endpoints or TLS files that cannot be used, such as a remote endpoint without TLS.
    """
    raw = read_below(run, ENDPOINT_FILE, _MAX_ENDPOINT_BYTES, owner=os.geteuid())
    endpoints, job, launch_id, user = _decoded(raw, run / ENDPOINT_FILE)
    credentials = None if not user else Credentials(user, read_password(run), run / PASSWORD_FILE)
    try:
        settings = EtcdSettings.of(endpoints, credentials=credentials)
    except ConfigError as error:
        raise ConfigError([f"{run / ENDPOINT_FILE}: {problem}" for problem in error.problems]) from error
    if any(endpoint.scheme == "https" for endpoint in settings.endpoints):
        settings = replace(settings, tls=_checked_tls(run))
    return OwnEtcd(job, launch_id, settings)


def read_job(run: Path) -> str:
    """Return the job of a run, from its endpoint file, no matter which user wrote it. Raises: OSError, DataError."""
    return _decoded(read_below(run, ENDPOINT_FILE, _MAX_ENDPOINT_BYTES), run / ENDPOINT_FILE)[1]


def read_password(run: Path) -> str:
    """Return the password of the run's own etcd. Raises: OSError; DataError for a text that no launch wrote."""
    raw = read_below(run, PASSWORD_FILE, _MAX_SECRET_BYTES, owner=os.geteuid(), is_secret=True)
    text = raw.decode("ascii", "replace").strip()
    if not _PASSWORD.fullmatch(text):
        raise DataError(f"{run / PASSWORD_FILE}: does not contain a password that a launch wrote")
    return text


def own_tls(run: Path) -> TlsFiles:
    """Return the files with which server and clients of the run's own etcd authenticate each other."""
    certificate = run / CERTIFICATE_FILE
    return TlsFiles(ca=certificate, certificate=certificate, key=run / KEY_FILE)


def _checked_tls(run: Path) -> TlsFiles:
    """Return the files of `own_tls` if they belong to this user and match. Raises: OSError, ConfigError.

    The files are opened again by name when they are used, in a directory that no other user can write. A key is never
    sent, so a replaced key could only make a connection fail.
    """
    for name in (CERTIFICATE_FILE, KEY_FILE):
        read_below(run, name, _MAX_SECRET_BYTES, owner=os.geteuid(), is_secret=name == KEY_FILE)
    tls = own_tls(run)
    tls.context()
    return tls


def _decoded(raw: bytes, path: Path) -> tuple[list[str], str, str, str]:
    """Return endpoints, job, launch id and user. Raises: DataError."""
    try:
        value = json.loads(raw)
        endpoints = value["endpoints"] if isinstance(value, Mapping) else None
        texts = [value["job"], value.get("launch_id", ""), value.get("user", "")]
        if not isinstance(endpoints, list) or not endpoints:
            raise TypeError("no endpoints")
        if not all(isinstance(endpoint, str) for endpoint in [*endpoints, *texts]):
            raise TypeError("not strings")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        rule = 'expected {"endpoints": ["unix:/PATH"], "job": "NAME"}'
        raise DataError(f"{path}: {rule}; use --rdzv-endpoint HOST:PORT instead") from error
    job, launch_id, user = texts
    return endpoints, job, launch_id, user

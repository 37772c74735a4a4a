"""The access to the job's own etcd: only root and one user have it, with one password, and from other hosts only with
its certificate.

The password is for an etcd on a unix socket in a directory of mode 0700: only its owner can reach it, so no other user
can set a password first.

When other hosts reach the etcd, server and clients share a certificate, and trust nothing else. A password is not
enough: an etcd that asks for one still answers some calls without it, and one of these (an alarm) ends its password
checks (ADR 0038, measured). A client without the certificate's key fails in the handshake.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from megatrain.contracts.errors import ConfigError, CoordinationError, CoordinationRefusedError
from megatrain.contracts.files.whole_files import write_private
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.gateway_response import JsonObject
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles

_ROOT = "root"

_BEFORE = timedelta(days=1)
"""Also accepted by hosts whose clocks are behind."""
_VALID = timedelta(days=3650)


class WrongPasswordError(CoordinationRefusedError):
    """Its users exist already, with another password."""


def admit_only(settings: EtcdSettings, credentials: Credentials) -> None:
    """Give all rights to root and this user and none to others; both have this password. May be repeated.

    `settings`: how to reach it, without a user. All other users and roles there are removed.
    Raises: WrongPasswordError when it already has another password; CoordinationError.
    """
    names = (_ROOT, credentials.user)
    with EtcdClient(settings) as client:
        is_open = _is_open(client)
        if is_open:
            for name in names:
                _set_password(client, name, credentials.password)
            with suppress(CoordinationError):  # newer versions have it by default
                _call(client, "/v3/auth/role/add", {"name": _ROOT})
            for name in names:
                _call(client, "/v3/auth/user/grant", {"user": name, "role": _ROOT})
            _remove_others(client, names)
            _call(client, "/v3/auth/enable", {})
    with EtcdClient(replace(settings, credentials=credentials)) as client:
        try:
            _remove_others(client, names)
        except CoordinationRefusedError as error:
            raise WrongPasswordError(f"has another password than this run: {error}") from error


def _is_open(client: EtcdClient) -> bool:
    """Return whether etcd accepts calls without a password."""
    try:
        _call(client, "/v3/auth/user/list", {})
    except CoordinationRefusedError:
        return False
    return True


def _set_password(client: EtcdClient, name: str, password: str) -> None:
    try:
        _call(client, "/v3/auth/user/add", {"name": name, "password": password})
    except CoordinationError as error:
        if "already exists" not in str(error):
            raise
        _call(client, "/v3/auth/user/changepw", {"name": name, "password": password})


def _remove_others(client: EtcdClient, names: Iterable[str]) -> None:
    users = _call(client, "/v3/auth/user/list", {}).get("users", [])
    roles = _call(client, "/v3/auth/role/list", {}).get("roles", [])
    for name in set(users) - set(names):
        _call(client, "/v3/auth/user/delete", {"name": name})
    for role in set(roles) - {_ROOT}:
        _call(client, "/v3/auth/role/delete", {"role": role})


def _call(client: EtcdClient, path: str, body: Mapping[str, str]) -> JsonObject:
    return client.gateway.call(path, dict(body), dict, what=f"etcd {path}", key=None, is_write=True)


def make_certificate(files: TlsFiles, address: str) -> None:
    """Write a new certificate for an IP address, and its key, to the places that `files` names.

    Raises: ConfigError if the package that makes it is missing; OSError.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        problem = "an etcd of the job's own that other hosts reach needs the package cryptography"
        raise ConfigError(
            [f"{problem}: pip install 'megatrain[launcher]', or name an etcd by --rdzv-endpoint=HOST:PORT"]
        ) from error
    assert files.certificate is not None
    assert files.key is not None
    key = ec.generate_private_key(ec.SECP256R1())
    # no common name: etcd takes it for a user name, and refuses requests that, like ours, name their user by a password
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "etcd of a megatrain job")])
    now = datetime.now(UTC)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - _BEFORE, now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(files.key, secret)
    write_private(files.certificate, certificate.public_bytes(pem))

"""Access to the job's own etcd: only root and one user have it, with the same password; other hosts also need the
certificate.

The password is set through a unix socket in a directory of mode 0700. Only the directory's owner can reach it, so no
other user can set a password first.

If other hosts use the etcd, server and clients share one certificate and trust no other. A password alone is not
enough: an etcd with passwords still answers some calls without one, and one of these calls (an alarm) ends its password
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
"""The certificate is valid from this long before its creation, for hosts with slow clocks."""
_VALID = timedelta(days=3650)


class WrongPasswordError(CoordinationRefusedError):
    """The etcd's users already have another password."""


def restrict_users(settings: EtcdSettings, credentials: Credentials) -> None:
    """Give root and the user of `credentials` all rights and the same password; remove all other users.

    `settings`: how to reach the etcd, without a user. Roles other than root are removed too. The call may be repeated.
    Raises: WrongPasswordError when the etcd already has another password; CoordinationError.
    """
    names = (_ROOT, credentials.user)
    with EtcdClient(settings) as client:
        is_open = _is_open(client)
        if is_open:
            for name in names:
                _set_password(client, name, credentials.password)
            with suppress(CoordinationError):  # newer versions have this role by default
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
    return client.gateway.call(path, dict(body), dict, what=f"etcd {path}", is_write=True)


def make_certificate(files: TlsFiles, address: str) -> None:
    """Write a new certificate for an IP address, and its key, to the paths in `files`.

    Raises: ConfigError if the package cryptography is missing; OSError.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        problem = "an etcd of the job's own that other hosts reach needs the package cryptography"
        raise ConfigError(
            [f"{problem}: pip install 'megatrain[launcher]', or name an etcd with --rdzv-endpoint=HOST:PORT"]
        ) from error
    assert files.certificate is not None
    assert files.key is not None
    key = ec.generate_private_key(ec.SECP256R1())
    # no common name: etcd would take it for a user name, and refuse clients that log in with a password, as megatrain's
    # clients do
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

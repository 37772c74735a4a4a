"""The users of the job's own etcd: only root and one user, with one password.

For an etcd on a unix socket in a directory of mode 0700: only its owner can reach it, so no other user can set a
password first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.gateway_response import JsonObject
from megatrain_job.coordination.settings import Credentials, EtcdSettings

_ROOT = "root"


class WrongPasswordError(CoordinationRefusedError):
    """Its users exist already, with another password."""


def admit_only(settings: EtcdSettings, credentials: Credentials) -> None:
    """Give access only to root and this user, who may do everything; both have this password. May be repeated.

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

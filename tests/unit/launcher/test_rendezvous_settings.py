"""The settings that torchrun passes on: endpoints, ids, --rdzv-conf; all errors at once, and no password in any
text."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from megatrain.contracts.errors import ConfigError
from megatrain_job.commands.etcd_flags import PASSWORD_VARIABLE
from megatrain_job.coordination.settings import Endpoint
from megatrain_launcher.hosts.address import own_address
from megatrain_launcher.rendezvous import torchrun_handler
from megatrain_launcher.rendezvous.handler import create_handler
from megatrain_launcher.rendezvous.settings import RendezvousSettings, read_settings

SECRET = "battery staple"


def read(
    options: dict[str, object],
    endpoint: str = "h1:1,h2:2",
    run_id: str = "job",
    environment: dict[str, str] | None = None,
) -> RendezvousSettings:
    return read_settings(endpoint, run_id, 1, 2, options, environment=environment or {})


def test_settings_without_torchrun_options() -> None:
    settings = read({"timeout": 900})
    assert [str(endpoint) for endpoint in settings.etcd.endpoints] == ["http://h1:1", "http://h2:2"]
    assert settings.etcd.credentials is None
    assert (settings.ttl_s, settings.renew_s, settings.join_timeout_s, settings.last_call_s) == (10, 3, 900, 2)
    assert settings.keys.prefix == "/megatrain/rdzv-job/"
    assert settings.host_range == "1:2"


def test_options_become_settings(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{SECRET}\n")
    settings = read(
        {"ttl": "4", "renew": "1.5", "timeout": 900, "join_timeout": "30", "user": "bob", "cacert": "/ca.pem"}
        | {"password_file": str(tmp_path / "password"), "last_call_timeout": "0", "stop_timeout": "5"}
    )
    assert (settings.ttl_s, settings.renew_s, settings.join_timeout_s) == (4, 1.5, 30)
    assert (settings.last_call_s, settings.stop_timeout_s) == (0, 5)
    assert settings.etcd.endpoints[0].scheme == "https"
    assert settings.etcd.tls.ca == Path("/ca.pem")
    assert settings.etcd.credentials is not None
    assert settings.etcd.credentials.password == SECRET
    assert SECRET not in repr(settings)


def test_a_password_from_the_environment() -> None:
    settings = read({"user": "bob"}, "https://h1:1", environment={PASSWORD_VARIABLE: SECRET})
    assert settings.etcd.credentials is not None
    assert settings.etcd.credentials.password == SECRET


def test_workers_do_not_inherit_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    parameters = RendezvousParameters("megatrain", "https://h1:1", "job", 1, 1, user="bob")
    create_handler(parameters)
    assert PASSWORD_VARIABLE not in os.environ


def problem_of(options: dict[str, object], run_id: str = "job") -> str:
    """Return why options or an id are refused, or "" if they are accepted."""
    try:
        read(options, run_id=run_id)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_wrong_option_is_named() -> None:
    for options, problem in [
        ({"color": "blue"}, r"--rdzv-conf color: no such key; the keys are cacert, cert, join_timeout"),
        ({"password": SECRET}, r"--rdzv-conf password: other users can see command lines.*password_file=PATH"),
        ({"user": "bob"}, rf"user=bob without a password; add password_file=PATH or set {PASSWORD_VARIABLE}"),
        ({"password_file": "/nowhere"}, r"password_file=/nowhere without user"),
        ({"user": "bob", "password_file": "/nowhere"}, r"password_file=/nowhere: .*No such file"),
        ({"ttl": "1"}, r"ttl='1' must be a number of seconds from 2"),
        ({"ttl": "soon"}, r"ttl='soon' must be a number"),
        ({"stop_timeout": "nan"}, r"stop_timeout='nan' must be a number"),
        ({"ttl": "4"}, r"renew=3 must be at most half of ttl=4"),
    ]:
        found = problem_of(options)
        assert re.search(problem, found), (options, found)
        assert SECRET not in found, options


def test_id_that_is_not_unique_or_no_name_is_refused() -> None:
    for run_id in ("none", "", "a/b", "a\nb"):
        found = problem_of({}, run_id)
        assert re.search(r"--rdzv-id=(.|\n)*: give the job a unique name", found), (run_id, found)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read({"ttl": "x", "color": "blue"}, endpoint=" ", run_id="none")
    assert len(caught.value.problems) == 4


def test_invalid_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="etcd endpoint 'a b': "):
        read({}, endpoint="a b")


def test_the_entry_point_returns_the_same_creator_each_time() -> None:
    """torch refuses a name whose creator changes."""
    assert torchrun_handler() is torchrun_handler()


def test_own_address_is_that_towards_etcd() -> None:
    assert own_address([Endpoint("http", "name.invalid", 1), Endpoint("http", "127.0.0.1", 2379)]) == "127.0.0.1"
    assert own_address([Endpoint("http", "name.invalid", 1)])

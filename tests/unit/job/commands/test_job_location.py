"""The search for the job of a command line, and limited trust in a directory that another user may have created."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain_job.commands.etcd_flags import PASSWORD_VARIABLE
from megatrain_job.commands.job_location import JobLocationError, add_job, job_location
from megatrain_job.coordination.settings import Credentials
from tests.helpers.other_user import as_other_user, readable_by_all
from tests.helpers.refusals import refusal

PASSWORD = secrets.token_urlsafe(24)
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server of another user, on a port of this machine. It must get no connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """<run>/coordination, below directories that other users may enter."""
    place = readable_by_all(tmp_path) / "run" / "coordination"
    place.mkdir(parents=True)
    return place


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private file of ours."""
    key = tmp_path / "id_ed25519"
    key.write_text(KEY)
    key.chmod(0o600)
    return key


def reported(server: socket.socket, **more: str) -> str:
    return json.dumps({"endpoints": [f"http://127.0.0.1:{server.getsockname()[1]}"], "job": "demo", **more})


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_job(parser)
    return parser.parse_args(arguments)


def test_password_of_an_own_run_is_used(server: socket.socket, place: Path) -> None:
    write(place / "endpoint", reported(server, user="megatrain"))
    write(place / "password", PASSWORD)
    found = job_location(parsed(str(place.parent)))
    assert found.job == "demo"
    assert found.settings.credentials == Credentials("megatrain", PASSWORD)


def test_a_file_cannot_name_the_password(server: socket.socket, place: Path, key: Path) -> None:
    write(place / "endpoint", reported(server, user="megatrain", password_file=str(key)))
    with pytest.raises(JobLocationError, match="coordination/password: no such file"):
        job_location(parsed(str(place.parent)))


def test_a_fifo_and_then_a_link_send_no_key_of_ours(server: socket.socket, place: Path, key: Path) -> None:
    """The file belongs to the attacker when it is read, and to us when its owner is checked."""
    endpoint = place / "endpoint"
    os.mkfifo(endpoint)

    def answer() -> None:
        with suppress(BrokenPipeError), endpoint.open("w") as file:  # waits for a reader
            (place / "link").symlink_to(key)
            os.replace(place / "link", endpoint)
            file.write(reported(server, user="u", password_file=str(key)))

    attacker = threading.Thread(target=answer)
    attacker.start()
    try:
        with pytest.raises(JobLocationError, match="endpoint: is not a regular file"):
            job_location(parsed(str(place.parent)))
    finally:
        reader = os.open(endpoint, os.O_RDONLY | os.O_NONBLOCK)  # Release the attacker, which waits now or soon.
        attacker.join()
        os.close(reader)


def test_another_users_run_is_not_followed(server: socket.socket, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner chooses the server, and would receive everything that is sent there."""
    monkeypatch.setenv(PASSWORD_VARIABLE, "mine")
    place.chmod(0o777)
    as_other_user(lambda: write(place / "endpoint", reported(server, user="u"), 0o644))
    place.chmod(0o755)
    with pytest.raises(
        JobLocationError, match=r"belongs to user \d+, not to user \d+; only the user who launched a job"
    ):
        job_location(parsed(str(place.parent)))


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (lambda place, key: place.chmod(0o777), r"coordination: can be written by others .*mode 777"),
        (lambda place, key: replaced_by_link(place, place.parent / "aside"), "coordination: is a symbolic link"),
        (lambda place, key: (place / "endpoint").chmod(0o666), "endpoint: can be written by others"),
        (lambda place, key: replaced_by_link(place / "endpoint", place / "aside"), "endpoint: is a symbolic link"),
        (lambda place, key: os.truncate(place / "endpoint", 1 << 40), "endpoint: has more than 65,536 bytes"),
        (lambda place, key: write(place / "endpoint", "[" * 60_000), 'endpoint: expected {"endpoints"'),
        (lambda place, key: (place / "password").chmod(0o644), "password: has mode 644, expected 600"),
        (lambda place, key: emptied(place).symlink_to(key), "password: is a symbolic link"),
        (lambda place, key: emptied(place).hardlink_to(key), "password: does not contain a password that a launch"),
        (lambda place, key: os.mkfifo(emptied(place)), "password: is not a regular file"),
        (lambda place, key: os.truncate(place / "password", 1 << 40), "password: has more than 16,384 bytes"),
    ],
)
def test_run_of_another_user_is_refused(
    server: socket.socket, place: Path, key: Path, corrupt: Callable[[Path, Path], object], problem: str
) -> None:
    write(place / "endpoint", reported(server, user="megatrain"))
    write(place / "password", PASSWORD)
    corrupt(place, key)
    with pytest.raises(JobLocationError, match=problem) as caught:
        job_location(parsed(str(place.parent)))
    assert "PRIVATE KEY" not in str(caught.value)


def replaced_by_link(path: Path, aside: Path) -> None:
    path.rename(aside)
    path.symlink_to(aside)


def emptied(place: Path) -> Path:
    """Return the file from which the password was removed."""
    (place / "password").unlink()
    return place / "password"


def test_credentials_go_to_the_etcd_of_the_command_line(
    server: socket.socket, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "mine")
    write(place / "endpoint", reported(server))
    for flags in (("--etcd-user=u",), ("--etcd-password-file=f", "--etcd-user=u"), ("--etcd-cacert=f",)):
        reason = refusal(JobLocationError, job_location, parsed(str(place.parent), *flags))
        assert "--etcd-* and --rdzv-conf apply only to the etcd of --rdzv-endpoint" in reason, flags


def test_a_password_goes_to_no_other_machine_in_the_clear(place: Path) -> None:
    write(place / "endpoint", json.dumps({"endpoints": ["http://10.0.0.1:1"], "job": "demo", "user": "megatrain"}))
    write(place / "password", PASSWORD)
    with pytest.raises((JobLocationError, ConfigError), match=r"endpoint: .*over plain http .*; let etcd serve TLS"):
        job_location(parsed(str(place.parent)))


def test_exit_code_of_the_last_job_is_shown_if_it_is_a_number(place: Path) -> None:
    absent = "no coordination/endpoint there"
    for code, message in (("78", "ended with exit code 78"), ("\x1b[2J", absent), ("7" * 99, absent)):
        (place / "exit-code").write_text(code)
        assert message in refusal(JobLocationError, job_location, parsed(str(place.parent))), code


def test_job_is_named_in_exactly_one_of_two_ways(server: socket.socket, place: Path) -> None:
    write(place / "endpoint", reported(server))
    run = str(place.parent)
    assert job_location(parsed("--job", run)).job == "demo"
    assert job_location(parsed(run, "--job", run)).job == "demo"
    with pytest.raises(JobLocationError, match=r"JOB is '.*/run' and --job=other: two jobs; give one of them"):
        job_location(parsed(run, "--job=other"))

"""E-mail to real SMTP servers: encrypted before the login, with a limit on every wait."""

from __future__ import annotations

import email
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email import policy
from pathlib import Path

import pytest

from megatrain_launcher.notify.delivery import DeliveryError
from megatrain_launcher.notify.receivers import Receiver, receivers_of
from tests.helpers.certificates import Authority
from tests.helpers.mail_receiver import MailReceiver
from tests.helpers.notification_topics import config_with, make_message, make_topic, over, write_secret

# aiosmtpd warns of the settings of some tests.
pytestmark = pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
LOGIN = ("megatrain", "a-secret-password")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


def receiver_for(directory: Path, port: int, encryption: str, *, ca: Path | None = None, more: str = "") -> Receiver:
    password = write_secret(directory / "password", LOGIN[1])
    login = "" if encryption == "none" else f'user = "{LOGIN[0]}"\npassword_file = "{password}"\n'
    config = config_with(
        directory,
        f'[notify]\nca_file = "{ca or ""}"\n{more}\n'
        f'[email]\nrecipients = "a@example.org, b@example.org"\nsender = "megatrain@example.org"\nhost = "127.0.0.1"\n'
        f'port = {port}\nencryption = "{encryption}"\n{login}',
    )
    (receiver,) = receivers_of(config)
    return receiver


@pytest.mark.parametrize("encryption", ["starttls", "tls", "none"])
def test_mail_arrives_with_the_facts(tmp_path: Path, authority: Authority, encryption: str) -> None:
    login = None if encryption == "none" else LOGIN
    with MailReceiver(encryption, authority.sign("mail"), login) as server:
        one = receiver_for(tmp_path, server.port, encryption, ca=authority.files.certificate)
        assert one.try_once(make_message(over(make_topic()))) == "accepted"
    (mail,) = server.mails
    assert mail.rcpt_tos == ["a@example.org", "b@example.org"]
    assert mail.mail_from == "megatrain@example.org"
    read = email.message_from_bytes(mail.content, policy=policy.default)
    assert read["Subject"].strip().startswith("[over] demo: a worker ended")
    assert "where: host-2 (rank 3)" in read.get_content()
    assert "lost: 3.2 s, 4 steps lost" in read.get_content()


@pytest.mark.parametrize("encryption", ["starttls", "tls"])
def test_a_server_without_a_trusted_certificate_gets_no_password(
    tmp_path: Path, authority: Authority, encryption: str
) -> None:
    other = Authority.create(tmp_path, "other")
    with MailReceiver(encryption, authority.sign("mail"), LOGIN) as server:
        one = receiver_for(tmp_path, server.port, encryption, ca=other.files.certificate)
        with pytest.raises(DeliveryError, match="certificate is not trusted"):
            one.try_once(make_message())
    assert server.mails == []


def test_a_server_without_starttls_gets_no_password(tmp_path: Path) -> None:
    """An attacker on the network path may have removed STARTTLS from the answer."""
    with MailReceiver("none", login=LOGIN) as server, pytest.raises(DeliveryError, match="STARTTLS"):
        receiver_for(tmp_path, server.port, "starttls").try_once(make_message())
    assert server.mails == []


def test_a_wrong_password_is_reported_and_not_shown(tmp_path: Path, authority: Authority) -> None:
    server = MailReceiver("starttls", authority.sign("mail"), (LOGIN[0], "another"))
    with server, pytest.raises(DeliveryError, match="answers 535") as caught:
        receiver_for(tmp_path, server.port, "starttls", ca=authority.files.certificate).try_once(make_message())
    assert LOGIN[1] not in str(caught.value)


def test_refused_message_is_reported_with_the_answer(tmp_path: Path) -> None:
    for answer in ("451 try later", "554 no"):
        with (
            MailReceiver(answer=answer) as server,
            pytest.raises(DeliveryError, match=f"answers {answer[:3]}: {answer[4:]}"),
        ):
            receiver_for(tmp_path, server.port, "none").try_once(make_message())


@contextmanager
def strange_server(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """Run a server that behaves as `talk` does; yield its port."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection, suppress(OSError):
                talk(connection, is_over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            is_over.set()
            thread.join()


def _hang(connection: socket.socket, is_over: threading.Event) -> None:
    is_over.wait()


def _drip(connection: socket.socket, is_over: threading.Event) -> None:
    while not is_over.wait(0.02):
        connection.sendall(b"2")


def _chatter(connection: socket.socket, is_over: threading.Event) -> None:
    while not is_over.is_set():
        connection.sendall(b"220-and another thing\r\n" * 100)


def _hang_up(connection: socket.socket, is_over: threading.Event) -> None:
    connection.sendall(b"220 hello\r\n")
    connection.recv(100)


@pytest.mark.slow(
    kept=["_hang_up-closed", "_chatter-more than 65,536 bytes|no answer within", "_drip-no answer within|timed out"]
)
@pytest.mark.parametrize(
    ("talk", "text"),
    [
        (_hang, "no answer within|timed out"),
        (_drip, "no answer within|timed out"),
        (_chatter, "more than 65,536 bytes|no answer within"),
        (_hang_up, "closed"),
    ],
)
def test_a_strange_server_ends_in_time(
    tmp_path: Path, talk: Callable[[socket.socket, threading.Event], None], text: str
) -> None:
    with strange_server(talk) as port, pytest.raises(DeliveryError, match=text):
        receiver_for(tmp_path, port, "none", more="timeout_s = 0.5").try_once(make_message())


def _take_and_hang(connection: socket.socket, is_over: threading.Event) -> None:
    """Accept a message, and never answer QUIT."""
    reader = connection.makefile("rb")
    connection.sendall(b"220 hello\r\n")
    while line := reader.readline():
        word = line.split()[0].upper()
        if word == b"QUIT":
            is_over.wait()
            return
        if word == b"DATA":
            connection.sendall(b"354 go on\r\n")
            while reader.readline() != b".\r\n":
                pass
        connection.sendall(b"250 ok\r\n")


def test_accepted_mail_is_not_sent_again_after_a_failed_quit(tmp_path: Path) -> None:
    with strange_server(_take_and_hang) as port:
        one = receiver_for(tmp_path, port, "none", more="timeout_s = 0.5")
        assert one.try_once(make_message()) == "accepted"

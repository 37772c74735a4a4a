"""Messages over real sockets: misbehaving receivers, and how their errors are reported."""

from __future__ import annotations

import os
import ssl
import threading
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.network_address import WebAddress
from megatrain_launcher.notify.delivery import MAX_RETRY_AFTER_S, DeliveryError, post, read_template, tls_context
from megatrain_launcher.notify.receivers import read_secret, receivers_of
from tests.helpers.certificates import Authority, CertificateFiles
from tests.helpers.http_receiver import HttpReceiver, ReceiverReply
from tests.helpers.notification_topics import config_with, make_message, make_topic, over, write_secret

SECRET = "T000/B000/verysecretpath"
CONTEXT = ssl.create_default_context()


def post_to(url: str, **more: Any) -> str:
    return post(
        WebAddress.parse(url), b"{}", more.pop("context", CONTEXT), timeout_s=more.pop("timeout_s", 5.0), **more
    )


def error_of(receiver: HttpReceiver, **more: Any) -> DeliveryError:
    with pytest.raises(DeliveryError) as caught:
        post_to(f"{receiver.url}/services/{SECRET}", **more)
    assert SECRET not in str(caught.value)
    return caught.value


def test_a_message_arrives_as_it_was_sent() -> None:
    with HttpReceiver() as receiver:
        assert post_to(f"{receiver.url}/a/b?c=d", bearer="token-of-ours") == "200 ok"
    (posted,) = receiver.posted
    assert (posted.path, posted.body) == ("/a/b?c=d", b"{}")
    assert posted.headers["authorization"] == "Bearer token-of-ours"
    assert posted.headers["content-type"] == "application/json"
    with pytest.raises(DeliveryError, match="Connection refused"):
        post_to(receiver.url)  # it is closed


def test_a_redirect_is_not_followed() -> None:
    statuses = (301, 302, 307, 308)
    with HttpReceiver() as elsewhere:
        with HttpReceiver(*(ReceiverReply(status, {"Location": elsewhere.url}) for status in statuses)) as receiver:
            for status in statuses:
                assert "a redirect, which is not followed" in str(error_of(receiver)), status
        assert elsewhere.posted == []


def test_unsuccessful_response_is_reported() -> None:
    later = formatdate(4_000_000_000, usegmt=True)
    cases = [
        (ReceiverReply(500, body=b"boom"), "answers 500: boom", 0.0),
        (ReceiverReply(404, body=b"no_service"), "answers 404: no_service", 0.0),
        (ReceiverReply(429, {"Retry-After": "30"}, b""), "answers 429", 30.0),
        (ReceiverReply(503, {"Retry-After": "7"}, b""), "answers 503", 7.0),
        (ReceiverReply(429, {"Retry-After": "999999999"}, b""), "answers 429", MAX_RETRY_AFTER_S),
        (ReceiverReply(429, {"Retry-After": "soon"}, b""), "answers 429", 0.0),
        (ReceiverReply(429, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, b""), "answers 429", 0.0),
        (ReceiverReply(429, {"Retry-After": later}, b""), "answers 429", MAX_RETRY_AFTER_S),
        (ReceiverReply(is_dropped=True), "the connection was closed without an answer", 0.0),
    ]
    with HttpReceiver(*(reply for reply, _, _ in cases)) as receiver:
        for number, (reply, text, retry_after_s) in enumerate(cases, 1):
            error = error_of(receiver)
            assert text in str(error), reply
            assert error.retry_after_s == retry_after_s, reply
            assert len(receiver.posted) == number, reply


def test_silent_receiver_is_not_awaited() -> None:
    with HttpReceiver(ReceiverReply(hold=threading.Event())) as receiver:
        assert "no answer within 0.2 s" in str(error_of(receiver, timeout_s=0.2))


def _drip(out: Any, is_over: threading.Event) -> None:
    out.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not is_over.wait(0.02):
        out.write(b"x")
        out.flush()


def _flood(out: Any, is_over: threading.Event) -> None:
    out.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not is_over.is_set():
        out.write(b"endless " * 8192)


def _garbage(out: Any, is_over: threading.Event) -> None:
    out.write(b"SSH-2.0-OpenSSH\r\n\r\n")


def test_a_strange_answer_ends_in_time() -> None:
    with HttpReceiver(ReceiverReply(raw=_drip), ReceiverReply(raw=_garbage), ReceiverReply(raw=_flood)) as receiver:
        assert "no answer within" in str(error_of(receiver, timeout_s=0.3))
        assert "is not HTTP" in str(error_of(receiver))
        answer = post_to(receiver.url)
    assert answer.startswith("200 endless endless ")
    assert len(answer) <= 210


def test_secrets_are_in_no_text() -> None:
    body = f"bad path /services/{SECRET} with token-of-ours \x1b[31m".encode()
    with HttpReceiver(ReceiverReply(403, body=body)) as receiver:
        text = str(error_of(receiver, bearer="token-of-ours"))
    assert "token-of-ours" not in text
    assert "\x1b" not in text
    assert "bad path (secret) with (secret)" in text


def test_certificates_are_checked(tmp_path: Path) -> None:
    ours, other = Authority.create(tmp_path, "ours"), Authority.create(tmp_path, "other")
    with HttpReceiver(tls=ours.sign("receiver")) as receiver:
        for context in (CONTEXT, tls_context(str(other.files.certificate))):
            assert "its certificate is not trusted" in str(error_of(receiver, context=context))
        assert receiver.posted == []
        assert post_to(receiver.url, context=tls_context(str(ours.files.certificate))) == "200 ok"


def test_a_certificate_of_another_name_is_not_trusted(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    leaf = authority.signer.issue_cert("receiver.example")
    files = CertificateFiles(tmp_path / "other.pem", tmp_path / "other.key")
    leaf.cert_chain_pems[0].write_to_path(files.certificate)
    leaf.private_key_pem.write_to_path(files.key)
    with HttpReceiver(tls=files) as receiver:
        text = str(error_of(receiver, context=tls_context(str(authority.files.certificate))))
    assert "its certificate is not trusted" in text
    assert receiver.posted == []


def test_invalid_address_is_refused_without_being_shown() -> None:
    for text, rule in [
        ("https://user:secret@host/x", "must not hold a user or a password"),
        ("https://@host/x", "must not hold a user or a password"),
        ("ftp://host/x", "must begin with https:// or http://"),
        ("hooks.slack.com/x", "must begin with https:// or http://"),
        ("https://host:99999/x", "invalid host or port"),
        ("https://host:0/x", "invalid host or port"),
        ("https:///x", "invalid host or port"),
        ("https://ho st/x", "must be ASCII without spaces"),
        ("https://host/x\r\nX-Evil: 1", "must be ASCII without spaces"),
        ("https://h\u00f6st/x", "must be ASCII without spaces"),
        ("https://host/x#y", "a part after #"),
        ("https://host/" + "x" * 3000, "of at most 2048 characters"),
        ("https://[::1", "invalid host or port"),
    ]:
        problem = ""
        try:
            WebAddress.parse(text)
        except ValueError as error:
            problem = str(error)
        assert rule in problem, text[:40]
        assert "secret" not in problem, text[:40]


def test_an_address_shows_nothing_but_its_host() -> None:
    address = WebAddress.parse(f"https://hooks.slack.com/services/{SECRET}?x=1")
    assert str(address) == "https://hooks.slack.com"
    assert SECRET not in repr(address)
    assert address.target == f"/services/{SECRET}?x=1"
    assert WebAddress.parse("http://[::1]:8080").authority == "[::1]:8080"
    private = ["https://a", "http://localhost:1", "http://127.0.0.1", "http://[::1]"]
    assert [WebAddress.parse(text).is_private for text in [*private, "http://10.0.0.1"]] == [True] * 4 + [False]


def test_a_secret_is_read_from_a_file_of_ones_own_alone(tmp_path: Path) -> None:
    good = write_secret(tmp_path / "good", SECRET)
    assert read_secret(good, "slack.url_file") == SECRET
    link = tmp_path / "link"
    link.symlink_to(good)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    cases = {
        write_secret(tmp_path / "open", SECRET, 0o640): "has mode 640",
        write_secret(tmp_path / "world", SECRET, 0o604): "has mode 604",
        str(link): "is a symbolic link",
        str(pipe): "is not a regular file",
        str(tmp_path): "is not a regular file",
        str(tmp_path / "none"): "No such file",
        write_secret(tmp_path / "empty", ""): "holds no secret",
        write_secret(tmp_path / "two", f"{SECRET}\n{SECRET}"): "holds no secret",
        write_secret(tmp_path / "large", "x" * 5000): "holds no secret",
        write_secret(tmp_path / "text", f"{SECRET} and more"): "holds no secret",
    }
    for path, text in cases.items():
        with pytest.raises(ConfigError, match=r"slack\.url_file") as caught:
            read_secret(path, "slack.url_file")
        assert text in str(caught.value), (path, str(caught.value))
        assert SECRET not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_secret_in_another_users_file_is_refused(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "theirs", SECRET)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_secret(path, "slack.url_file")


def test_each_receiver_gets_its_form(tmp_path: Path) -> None:
    with HttpReceiver() as receiver:
        slack = write_secret(tmp_path / "slack", f"{receiver.url}/services/{SECRET}")
        key = write_secret(tmp_path / "key", "0123456789abcdef0123456789abcdef")
        token = write_secret(tmp_path / "token", "am-token")
        config = config_with(
            tmp_path,
            f'[slack]\nurl_file = "{slack}"\n'
            f'[pagerduty]\nrouting_key_file = "{key}"\nurl = "{receiver.url}/v2/enqueue"\n'
            f'[alertmanager]\nurl = "{receiver.url}/prefix/"\ntoken_file = "{token}"\n'
            f'[webhook]\nurl = "{receiver.url}/hook"\n',
        )
        receivers = receivers_of(config)
        assert [one.name for one in receivers] == ["slack", "pagerduty", "alertmanager", "webhook"]
        message = make_message(make_topic("incident/new"), over(make_topic("incident/old")))
        for one in receivers:
            assert one.problem() == ""
            assert one.try_once(message).startswith("200")
        paths = [posted.path for posted in receiver.posted]
        hook = f"/services/{SECRET}"
        assert paths == [hook, "/v2/enqueue", "/v2/enqueue", "/prefix/api/v2/alerts", "/hook"]
        assert [one.document["event_action"] for one in receiver.posted[1:3]] == ["resolve", "trigger"]
        assert receiver.posted[3].headers["authorization"] == "Bearer am-token"
        assert "authorization" not in receiver.posted[4].headers
        # A secret in the answer is not repeated.
        receiver.usual = ReceiverReply(400, body=b'invalid routing_key "0123456789abcdef0123456789abcdef"')
        with pytest.raises(DeliveryError) as caught:
            receivers[1].try_once(message)
        assert "0123456789abcdef" not in str(caught.value)


def test_invalid_template_is_reported_early(tmp_path: Path) -> None:
    template = tmp_path / "template"
    config = config_with(tmp_path, f'[webhook]\nurl = "http://127.0.0.1:9/hook"\ntemplate_file = "{template}"\n')
    (receiver,) = receivers_of(config)
    assert "No such file" in receiver.problem()
    for text, problem in (
        ("$unknown", "has the unknown name $unknown"),
        ("$", "does not begin a name"),
        ("{$title", ""),
    ):
        template.write_text(text)
        assert problem in receiver.problem(), text
    with pytest.raises(DeliveryError, match="is not JSON once it is filled in"):
        receiver.try_once(make_message())
    template.write_bytes(b"x" * 70_000)
    with pytest.raises(ConfigError, match="more than 65,536 bytes"):
        read_template(str(template), "webhook.template_file")


def test_a_template_fills_the_body_of_a_webhook(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text('{"content": "$title", "lost": "$lost"}')
    with HttpReceiver() as receiver:
        config = config_with(tmp_path, f'[webhook]\nurl = "{receiver.url}/x"\ntemplate_file = "{template}"\n')
        (one,) = receivers_of(config)
        one.try_once(make_message(over(make_topic())))
        assert receiver.documents[0]["lost"] == "3.2 s, 4 steps lost"

"""`megatrain notify test`: the answers of the receivers, and which configuration is trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.cli import main
from tests.helpers.http_receiver import HttpReceiver, ReceiverReply
from tests.helpers.notification_topics import SMALL, write_secret
from tests.helpers.vendor_rules import check_alertmanager, check_pagerduty

KEY = "0123456789abcdef0123456789abcdef"


def write_config(directory: Path, receiver: HttpReceiver) -> Path:
    key = write_secret(directory / "key", KEY)
    path = directory / "config.toml"
    path.write_text(
        f'{SMALL}[pagerduty]\nrouting_key_file = "{key}"\nurl = "{receiver.url}/v2/enqueue"\n'
        f'[alertmanager]\nurl = "{receiver.url}"\n[webhook]\nurl = "{receiver.url}/hook"\n'
    )
    return path


def test_every_receiver_is_tried_and_its_test_alert_resolved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpReceiver() as receiver:
        assert main(["notify", "test", str(write_config(tmp_path, receiver))]) == 0
        triggered, resolved = receiver.documents[:2]
        fired, ended = receiver.documents[2:4]
    assert capsys.readouterr().out.splitlines() == [
        "pagerduty: 200 ok (and resolved again)", "alertmanager: 200 ok (and resolved again)", "webhook: 200 ok",
    ]  # fmt: skip
    for event in (triggered, resolved):
        check_pagerduty(event)
    assert [triggered["event_action"], resolved["event_action"]] == ["trigger", "resolve"]
    assert triggered["dedup_key"] == resolved["dedup_key"]
    for alerts in (fired, ended):
        check_alertmanager(alerts)
    assert fired[0]["labels"] == ended[0]["labels"]
    assert receiver.documents[4]["text"].count("this is a test message")


def test_failed_receiver_is_reported_and_the_others_are_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpReceiver(ReceiverReply(403, body=f"no such key {KEY}".encode())) as receiver:
        assert main(["notify", "test", str(write_config(tmp_path, receiver))]) == 1
    out = capsys.readouterr().out
    assert "pagerduty: FAILED: http://127.0.0.1" in out
    assert "answers 403: no such key (secret)" in out
    assert KEY not in out
    assert "webhook: 200 ok" in out


def test_receiver_is_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with HttpReceiver() as receiver:
        path = write_config(tmp_path, receiver)
        assert main(["notify", "test", str(tmp_path), "--receiver", "webhook"]) == 0
        assert [one.path for one in receiver.posted] == ["/hook"]
        assert main(["notify", "test", str(path), "--receiver", "slack"]) == 78
    assert "configured are: pagerduty, alertmanager, webhook" in capsys.readouterr().err


def test_notify_without_receivers_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(SMALL)
    assert main(["notify", "test", str(tmp_path)]) == 78
    assert "no receiver is configured" in capsys.readouterr().err


def test_a_run_that_others_can_write_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its author could name our secrets, and an address to which they are sent."""
    with HttpReceiver() as receiver:
        path = write_config(tmp_path, receiver)
        path.chmod(0o666)
        assert main(["notify", "test", str(tmp_path)]) == 65
        path.chmod(0o644)
        tmp_path.chmod(0o777)
        assert main(["notify", "test", str(tmp_path)]) == 65
        tmp_path.chmod(0o755)
        kept = tmp_path / "kept.toml"
        path.rename(kept)
        path.symlink_to(kept)
        assert main(["notify", "test", str(tmp_path)]) == 65
        assert receiver.posted == []
    assert capsys.readouterr().err.count("other users may have written it") >= 2

"""Rules of the receivers of notifications: no secret is sent where others can read it, and no setting is without
effect."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.serialize import config_hash, config_of_values, config_values, to_toml
from megatrain.contracts.errors import ConfigError
from tests.helpers.notification_topics import config_with

MAIL = '[email]\nrecipients = "a@b.org"\nsender = "m@b.org"\nhost = "mail"\n'
PROBLEMS = {
    '[slack]\nurl_file = "x"\nevents = "incident, weather"': "slack.events",
    '[slack]\nurl_file = "x"\nlevel = "blue"': 'use "green", "amber" or "red"',
    '[slack]\nurl = "https://hooks.slack.com/x"': "slack.url",
    '[slack]\nlevel = "red"': 'slack.level="red" does nothing without a receiver; set slack.url_file',
    '[notify]\npage_url = "https://page"': "does nothing without a receiver; name a receiver",
    '[pagerduty]\nrouting_key_file = "k"\nurl = "http://events.example/v2"': "is plain http to another machine",
    '[pagerduty]\nrouting_key_file = "k"\nurl = "https://me:hidden@events.example"': "must not hold a user",
    '[alertmanager]\nurl = "http://am:9093"\ntoken_file = "t"': "is plain http to another machine (http://am:9093)",
    '[alertmanager]\nurl = "am:9093"': "must begin with https:// or http://",
    '[webhook]\nurl = "https://a"\nurl_file = "b"': "webhook.url and url_file are both set",
    '[webhook]\nurl = "https://a"\ncontent_type = "text/plain\\r\\nX: y"': "webhook.content_type",
    '[email]\nrecipients = "no-address"': "email.recipients",
    '[email]\nrecipients = "a@b.org\\nBcc: c@d.org"': "email.recipients",
    '[email]\nrecipients = "a@b.org"': "email.recipients needs email.sender",
    f'{MAIL}user = "me"': "email.user and password_file go together, and email.password_file is",
    f'{MAIL}password_file = "p"': "email.user and password_file go together, and email.user is",
    f'{MAIL}user = "me"\npassword_file = "p"\nencryption = "none"': "unencrypted over the network",
    f"{MAIL}port = 0": "email.port",
    f"{MAIL}[notify]\ntimeout_s = 0": "notify.timeout_s",
    f'{MAIL}[notify]\nrunbooks_url = "javascript:x"': "notify.runbooks_url must begin with https",
}


def test_invalid_receivers_are_refused(tmp_path: Path) -> None:
    for sections, problem in PROBLEMS.items():
        with pytest.raises(ConfigError) as caught:
            raise AssertionError(f"accepted: {config_with(tmp_path, sections)}\n{sections}")
        assert any(problem in one for one in caught.value.problems), (sections, caught.value)
        assert "hidden" not in str(caught.value)


def test_valid_receivers_are_accepted(tmp_path: Path) -> None:
    def receivers(sections: str) -> tuple[str, ...]:
        config: Config = config_with(tmp_path, sections)
        return config.receivers

    assert receivers("") == ()
    assert receivers('[slack]\nurl_file = "x"\nevents = "incident, end"\nlevel = "red"') == ("slack",)
    assert receivers('[webhook]\nurl_file = "x"\n[alertmanager]\nurl = "http://am:9093"') == ("alertmanager", "webhook")
    assert receivers(f'{MAIL}encryption = "none"\n[notify]\npage_url = "http://page:8777"') == ("email",)


SEVERAL = """
[[slack]]
url_file = "ops"
[[slack]]
url_file = "research"
level = "red"
[webhook]
url = "https://a"
[webhook-3]
url = "https://b"
"""


def test_a_kind_of_receiver_may_stand_several_times(tmp_path: Path) -> None:
    config = config_with(tmp_path, SEVERAL)
    assert config.receivers == ("slack", "slack-2", "webhook", "webhook-3")
    assert (config.slack.url_file, config.sections["slack-2"].url_file) == ("ops", "research")
    assert (config.sections["slack-2"].level, config.sections["webhook-3"].url) == ("red", "https://b")
    # The message is the same for text, in a record, and with another value from the command line.
    text = to_toml(config)
    assert text.count("[slack-2]") == 1
    assert Config.from_dict(tomllib.loads(text)) == config
    assert config_of_values(config_values(config), "demo") == config
    other = load_config(tmp_path / "config.toml", ["--slack-2.level=green"]).config
    assert other.sections["slack-2"].level == "green"
    assert config_hash(other) != config_hash(config)


def test_single_receiver_is_written_as_a_table(tmp_path: Path) -> None:
    single = config_with(tmp_path, '[slack]\nurl_file = "x"')
    assert single == config_with(tmp_path, '[[slack]]\nurl_file = "x"')
    assert "further" not in to_toml(single)


SEVERAL_PROBLEMS = [
    ('[[slack]]\nurl_file = "a"\n[[slack]]\nlevel = "blue"', 'slack-2.level="blue" .*config.toml:19'),
    ('[[slack]]\nurl_file = "a"\n[[slack]]\nlevel = "red"', 'slack-2.level="red" does nothing .*slack-2.url_file'),
    ('[[slack]]\nurl_file = "a"\n[[slack]]\nurl = "b"', r"slack-2.url=.* not a known key.*config.toml:19"),
    ('[[slack]]\n[[slack]]\nurl_file = "a"\n[slack-2]\nurl_file = "b"', r"\[slack-2\] and \[\[slack\]\] number 2"),
    ('[slack-1]\nurl_file = "a"', r"\[slack-1\] is not a known section; did you mean \[slack\]"),
    ('[slack-02]\nurl_file = "a"', r"\[slack-02\] is not a known section"),
    ('[slack-17]\nurl_file = "a"', r"\[slack-17\] is not a known section"),
    ('[[slack]]\nurl_file = "a"\n' * 17, r"\[\[slack\]\] appears 17 times, and at most 16 are allowed"),
    ('[[notify]]\npage_url = "https://p"', "notify=.* must be a section"),
    ('[[email]]\n[[email]]\nrecipients = "a@b.org"', "email-2.recipients needs email-2.sender"),
]  # fmt: skip


def test_mistake_in_one_of_several_receivers_names_it(tmp_path: Path) -> None:
    for sections, problem in SEVERAL_PROBLEMS:
        with pytest.raises(ConfigError, match=problem):
            raise AssertionError(f"accepted: {config_with(tmp_path, sections)}\n{sections}")

"""Rules of the receivers of notifications: no secret goes where others read it, and no setting does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError
from tests.helpers.told_topics import config_with

MAIL = '[email]\nrecipients = "a@b.org"\nsender = "m@b.org"\nhost = "mail"\n'
PROBLEMS = {
    '[slack]\nurl_file = "x"\nevents = "incident, weather"': "slack.events",
    '[slack]\nurl_file = "x"\nlevel = "blue"': 'use "green", "amber" or "red"',
    '[slack]\nurl = "https://hooks.slack.com/x"': "slack.url",
    '[slack]\nlevel = "red"': 'slack.level="red" does nothing while nobody is told; set slack.url_file',
    '[notify]\npage_url = "https://page"': "does nothing while nobody is told; name a receiver",
    '[pagerduty]\nrouting_key_file = "k"\nurl = "http://events.example/v2"': "is plain http to another machine",
    '[pagerduty]\nrouting_key_file = "k"\nurl = "https://me:hidden@events.example"': "must not hold a user",
    '[alertmanager]\nurl = "http://am:9093"\ntoken_file = "t"': "is plain http to another machine (http://am:9093)",
    '[alertmanager]\nurl = "am:9093"': "must begin with https:// or http://",
    '[webhook]\nurl = "https://a"\nurl_file = "b"': "webhook.url and url_file are both set",
    '[webhook]\nurl = "https://a"\ncontent_type = "text/plain\\r\\nX: y"': "webhook.content_type",
    '[email]\nrecipients = "nobody"': "email.recipients",
    '[email]\nrecipients = "a@b.org\\nBcc: c@d.org"': "email.recipients",
    '[email]\nrecipients = "a@b.org"': "email.recipients needs email.sender",
    f'{MAIL}user = "me"': "email.user and password_file go together, and email.password_file is",
    f'{MAIL}password_file = "p"': "email.user and password_file go together, and email.user is",
    f'{MAIL}user = "me"\npassword_file = "p"\nencryption = "none"': "everybody on the way can read it",
    f"{MAIL}port = 0": "email.port",
    f"{MAIL}[notify]\ntimeout_s = 0": "notify.timeout_s",
    f'{MAIL}[notify]\nrunbooks_url = "javascript:x"': "notify.runbooks_url must begin with https",
}


@pytest.mark.parametrize("sections", PROBLEMS)
def test_what_is_refused(tmp_path: Path, sections: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(tmp_path, sections)
    (problem,) = [one for one in caught.value.problems if PROBLEMS[sections] in one] or [str(caught.value)]
    assert PROBLEMS[sections] in problem, problem
    assert "hidden" not in str(caught.value)


def test_what_is_taken(tmp_path: Path) -> None:
    def receivers(sections: str) -> tuple[str, ...]:
        config: Config = config_with(tmp_path, sections)
        return config.receivers

    assert receivers("") == ()
    assert receivers('[slack]\nurl_file = "x"\nevents = "incident, end"\nlevel = "red"') == ("slack",)
    assert receivers('[webhook]\nurl_file = "x"\n[alertmanager]\nurl = "http://am:9093"') == ("alertmanager", "webhook")
    assert receivers(f'{MAIL}encryption = "none"\n[notify]\npage_url = "http://page:8777"') == ("email",)

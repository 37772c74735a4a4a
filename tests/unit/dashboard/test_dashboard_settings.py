"""The configurations of a dashboard that are refused before it starts, and the required owner of a token file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.errors import ConfigError
from megatrain_dashboard.settings import DashboardSettings, settings_of
from tests.helpers.dashboard_server import (
    VIEWER_TOKEN,
)
from tests.helpers.refusals import refusal

NOT_STARTED = {
    "from elsewhere without tokens": (
        {"address": "0.0.0.0"},
        "can be reached from other machines, so users must be authenticated",
    ),
    "a name without tokens": ({"address": "node-7"}, "viewer_token_file or operator_token_file"),
    "proxies without a user header": ({"trusted_proxies": "10.0.0.1"}, "needs dashboard.user_header"),
    "every address is a proxy": ({"trusted_proxies": "0.0.0.0/0", "user_header": "X-User"}, "contains every address"),
    "no network": ({"trusted_proxies": "10.0.0.300", "user_header": "X-User"}, "is not an address or network"),
    "a header from any client": ({"user_header": "X-User"}, "does nothing without dashboard.trusted_proxies"),
    "one header for both": (
        {"trusted_proxies": "10.0.0.1", "user_header": "X-User", "role_header": "x-user"},
        "name two headers",
    ),
    "a header that is none": ({"trusted_proxies": "10.0.0.1", "user_header": "X User"}, "text of the form"),
    "a path that is none": ({"base_path": "/a/../b c"}, "text of the form"),
    "a script as an address": ({"perfetto_url": "javascript:alert(1)"}, "text of the form"),
}


def settings_with(section: Mapping[str, str]) -> DashboardSettings:
    return settings_of(replace(DashboardConfig(), **section))  # type: ignore[arg-type]


def test_an_unsafe_configuration_is_not_started() -> None:
    for name, (section, message) in NOT_STARTED.items():
        assert message in refusal(ConfigError, settings_with, section), name


def make_token(path: Path, token: str, mode: int = 0o600) -> str:
    path.write_text(f"{token}\n")
    path.chmod(mode)
    return str(path)


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    good = make_token(tmp_path / "good", VIEWER_TOKEN)
    assert settings_of(DashboardConfig(viewer_token_file=good)).viewer_token == VIEWER_TOKEN
    assert VIEWER_TOKEN not in repr(settings_of(DashboardConfig(viewer_token_file=good)))
    for mode in (0o644, 0o640, 0o604):
        reported = make_token(tmp_path / "open", VIEWER_TOKEN, mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}: others may read it"):
            settings_of(DashboardConfig(operator_token_file=reported))
    with pytest.raises(ConfigError, match="could be guessed"):
        settings_of(DashboardConfig(viewer_token_file=make_token(tmp_path / "short", "secret")))
    with pytest.raises(ConfigError, match="not allowed in a header"):
        settings_of(DashboardConfig(viewer_token_file=make_token(tmp_path / "words", "two words are too many")))
    with pytest.raises(ConfigError, match="cannot be read"):
        settings_of(DashboardConfig(viewer_token_file=str(tmp_path / "nowhere")))
    both = make_token(tmp_path / "both", VIEWER_TOKEN)
    with pytest.raises(ConfigError, match="contain the same token"):
        settings_of(DashboardConfig(viewer_token_file=good, operator_token_file=both))
    with pytest.raises(ConfigError, match="name two files"):
        settings_of(DashboardConfig(viewer_token_file=good, operator_token_file=good))
    with pytest.raises(ConfigError, match="no operator can sign in"):
        settings_of(DashboardConfig(viewer_token_file=good, enable_actions=True))


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as wrong:
        settings_of(DashboardConfig(address="0.0.0.0", user_header="X-User", base_path="x"))
    assert len(wrong.value.problems) == 3

"""The page below a path behind a proxy finds its files, its API and its session."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.assets import installed_assets
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.protocol import LiveState
from tests.helpers.canned_dashboard import TOPICS
from tests.helpers.dashboard_server import OPERATOR_TOKEN, MadeUpJob, served
from tests.helpers.path_proxy import path_proxy

BASE = "/team/megatrain"


@pytest.mark.slow
@pytest.mark.parametrize("is_taken_away", [True, False])
def test_page_below_a_path_behind_a_proxy(tmp_path: Path, pages, is_taken_away: bool) -> None:
    pages.expected.append("401")
    settings = DashboardSettings(port=0, base_path=BASE, enable_actions=True, operator_token=OPERATOR_TOKEN)
    source = MadeUpJob(RunDirectory(tmp_path), state=LiveState(None, dict.fromkeys(TOPICS, 1)))
    with (
        served(tmp_path, settings, source=source, files=installed_assets()) as server,
        path_proxy(server.port, BASE, is_taken_away=is_taken_away) as port,
    ):
        page = pages.open(f"http://127.0.0.1:{port}{BASE}/#/incidents")
        answers: list[tuple[str, int]] = []
        page.on("response", lambda answer: answers.append((urlsplit(answer.url).path, answer.status)))
        page.get_by_label("Token").fill(OPERATOR_TOKEN)
        page.get_by_role("button", name="Sign in").click()
        page.locator("main[data-view=incidents] h1").wait_for()
        answers.clear()
        page.reload()
        page.locator("main[data-view=incidents] h1").wait_for()
        assert (f"{BASE}/", 200) in answers or (f"{BASE}/", 304) in answers
        assert (f"{BASE}/api/v1/job", 200) in answers
        assert [path for path, _ in answers if path.startswith(f"{BASE}/assets/")]
        assert [(path, status) for path, status in answers if not path.startswith(f"{BASE}/") or status >= 400] == []
        page.close()  # before its server: it would report the end of the stream

"""The page on the real server: the history of a run as a job leaves it, each view from its files."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.helpers.recorded_run import SCRIPT, write_recorded_run
from tests.helpers.served_run import served_run

# view -> a text that it shows for the run of recorded_run.py; test_web_sample.py has the other views
VIEWS = {
    "overview": "Last incident",
    "incidents": "Verdicts of the diagnosis",
    "timeline": "Timeline",
    "ranks?rank=2": "Ranks",
    "stragglers": "Findings",
    "logs": "Root cause",
}
NO_FULL_STEP = ("stragglers", "timeline")
"""Views that request steps recorded in full, of which this run has none: the server answers 404."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a recorded run."""
    directory = tmp_path_factory.mktemp("run")
    write_recorded_run(directory)
    with served_run(directory) as found:
        yield found


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_a_recorded_run(url: str, pages, view: str) -> None:
    pages.expected += ["404"] if view in NO_FULL_STEP else []
    page = pages.open(f"{url}#/{view}")
    page.locator("main").get_by_text(VIEWS[view], exact=True).first.wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)
    expect(page.locator("[role=alert]")).to_have_text([])
    expect(page.locator("main[data-connection=recorded]")).to_have_count(1)
    expect(page.locator(".header [data-health=bad]")).to_have_count(1)
    expect(page.locator(".header .headline")).to_contain_text("Unreachable")
    pages.screenshot(page, f"recorded_{view.replace('/', '_').replace('?', '_')}")


def test_script_in_a_log_line_is_seen_and_never_run(url: str, pages) -> None:
    page = pages.open(f"{url}#/logs")
    page.get_by_text(SCRIPT).first.wait_for()
    assert page.locator("main script").count() == 0


def test_earlier_round_is_selected_and_left(url: str, pages) -> None:
    pages.expected.append("404")
    page = pages.open(f"{url}#/logs")
    page.get_by_label("Round").select_option("1")
    page.get_by_text("Connection closed by peer").first.wait_for()
    page.get_by_role("link", name="Stragglers").click()
    page.locator("main[data-view=stragglers] h1").wait_for()
    expect(page).to_have_url(re.compile("round=1"))
    page.get_by_role("button", name="round 1 is shown").click()
    page.wait_for_function("() => !location.hash.includes('round')")

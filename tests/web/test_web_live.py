"""The page of a training job: every view, live changes, a restart of the server, an action."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import expect

from megatrain_dashboard.security.made_token import TOKEN_NAME
from tests.helpers.closed_loop import ClosedLoop, closed_loop
from tests.helpers.dashboard_process import DashboardProcess, dashboard_process
from tests.helpers.etcd_server import etcd_program
from tests.helpers.paced_train import StepPace
from tests.helpers.waiting import DEADLINE_S, wait_until

VIEWS = ("overview", "incidents", "hosts", "heat", "hosts/host-0", "timeline", "ranks", "stragglers", "logs",
         "checkpoints", "actions", "audit")  # fmt: skip
"""Of two neighbors the first parts differ, so that nothing of the view before is taken for the next one."""


@dataclass(frozen=True)
class Live:
    loop: ClosedLoop
    dashboard: DashboardProcess

    def token(self) -> str:
        return (self.dashboard.run / "diagnosis" / TOKEN_NAME).read_text().strip()

    def open(self, pages, view: str = "") -> object:
        """Open a view, logged in with the token that the dashboard created."""
        pages.expected.append("401")
        page = pages.open(f"{self.dashboard.url}{view}")
        page.get_by_label("Token").fill(self.token())
        page.get_by_role("button", name="Sign in").click()
        return page


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A paced job of two hosts and a spare that saves only on request, with daemon and dashboard."""
    etcd_program()
    root = tmp_path_factory.mktemp("live")
    with closed_loop(root, {"checkpoint": {"interval": 100_000}}, pace=StepPace()) as loop:
        run, job = loop.launched.job.files.root, loop.launched.job.config.job.name
        log = root / "dashboard.log"
        with dashboard_process(run, job, loop.launched.endpoints, log, "--enable-actions") as dashboard:
            yield Live(loop, dashboard)


def test_every_view_of_a_job_that_trains(live: Live, pages) -> None:
    page = live.open(pages)
    for view in VIEWS:
        page.evaluate("view => { location.hash = `#/${view}`; }", view)
        page.locator(f"main[data-view={view.partition('/')[0]}][data-connection=live] h1").wait_for()
        expect(page.locator(".skeleton"), view).to_have_count(0)  # what-if replays steps beside the job
        expect(page.locator("[role=alert]"), view).to_have_text([])
        pages.screenshot(page, f"live_{view.replace('/', '_')}")


def shown_step(page: object) -> int:
    text = page.locator("[data-figure=step]").inner_text()
    return int(text.replace(",", "")) if text[0].isdigit() else 0


def test_the_page_follows_the_steps_that_the_stream_reports(live: Live, pages) -> None:
    page = live.open(pages)
    page.locator("[data-figure=step]").wait_for()
    page.locator("main[data-connection=live]").wait_for()
    before = shown_step(page)
    wait_until(lambda: shown_step(page) > before, "a later step on the page")
    headers = {"Authorization": f"Bearer {live.token()}"}
    with urlopen(Request(f"{live.dashboard.url}api/v1/live", headers=headers), timeout=DEADLINE_S) as stream:
        steps = (json.loads(line.removeprefix(b"data: "))["step"] for line in stream if line.startswith(b"data: "))
        first = next(steps)
        reported = next(step for step in steps if step > first)
    wait_until(lambda: shown_step(page) >= reported, f"step {reported} on the page")
    assert reported > before


def test_restarted_dashboard_is_found_by_an_open_page(live: Live, pages) -> None:
    pages.expected += ["ERR_", "Failed to load", "503"]
    page = live.open(pages)
    page.locator("main[data-connection=live]").wait_for()
    live.dashboard.stop()
    page.locator("main[data-connection=reconnecting]").wait_for()
    live.dashboard.start()
    page.locator("main[data-connection=live]").wait_for()
    before = shown_step(page)
    wait_until(lambda: shown_step(page) > before, "steps continue")
    expect(page.locator("main[data-connection=live]")).to_have_count(1)


def test_requested_checkpoint_is_written(live: Live, pages) -> None:
    page = live.open(pages, "#/checkpoints")
    page.locator("main h1").wait_for()
    job = live.loop.launched.job.config.job.name
    page.locator("[data-action=checkpoint]").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Why?").fill("the test wants one")
    dialog.get_by_label("Type the name of the job").fill(job)
    dialog.get_by_role("button", name="Dry run").click()
    dialog.locator("[data-outcome='dry run']").wait_for()
    dialog.locator("[data-carry-out]").click()
    dialog.locator("[data-outcome=accepted], [data-outcome=done]").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("from here").first.wait_for()
    page.goto(f"{live.dashboard.url}#/audit")
    page.get_by_text("the test wants one").first.wait_for()
    lines = (live.loop.launched.job.files.root / "diagnosis" / "actions.jsonl").read_text().splitlines()
    assert any("the test wants one" in json.dumps(json.loads(line)) for line in lines)

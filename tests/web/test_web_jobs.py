"""The page of many jobs on the real server: the list, the navigation to a job and back, and the comparison of runs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from megatrain_dashboard.jobs.app import make_jobs_app
from megatrain_dashboard.server import DashboardServer, listening_socket
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.runs.catalog import JobCatalog
from tests.helpers.dashboard_server import VIEWER_TOKEN
from tests.helpers.many_runs import demo_config, held, report_steps, write_run

NUM_ENDED = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that ended, one that was just killed, and one with a damaged configuration."""
    runs = tmp_path_factory.mktemp("many") / "runs"
    began_s = time.time() - 3600.0
    for number in range(NUM_ENDED):
        config = demo_config(f"run-{number:02d}", optimizer={"lr": 1e-4 * (1 + number % 3)})
        write_run(
            runs / f"run-{number:02d}", num_steps=40, loss=2.0 - number / 100, step_s=1.0 + number % 5 / 10,
            config=config, began_s=began_s - 60.0 * number,
        )  # fmt: skip
    write_run(runs / "night-shift", num_steps=80, exit_code=None, began_s=began_s, has_incident=True)
    damaged = write_run(runs / "run-damaged", began_s=began_s - 4000.0)
    (damaged.root / "config.toml").write_text("[job\n")
    return runs


@pytest.fixture(scope="module", params=[""])
def url(runs: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Serve them; the parameter is the token of a viewer."""
    settings = DashboardSettings(port=0, viewer_token=request.param)
    catalog = JobCatalog(runs, period_s=0.2)
    dashboard = make_jobs_app(catalog, settings)
    with listening_socket(settings) as listening:
        server = DashboardServer(dashboard.app, listening, settings, dashboard)
        try:
            yield f"http://127.0.0.1:{server.port}/"
        finally:
            assert server.close(), "the server did not end"
            dashboard.open_jobs.close()
            catalog.close()


def row(page, name: str):
    return page.locator(f"tr[data-job='{name}']")


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_the_most_severe_job_is_first_and_leads_to_its_page(url: str, pages, width: int, scheme: str) -> None:
    page = pages.open(url, width=width, scheme=scheme)
    page.locator("table.jobs tbody tr").nth(49).wait_for()
    expect(page).to_have_url(f"{url}jobs")
    expect(page.locator("table.jobs tbody tr").first).to_have_attribute("data-job", "night-shift")
    expect(row(page, "night-shift")).to_contain_text("its launch (process 17")
    expect(page).to_have_title(re.compile(r"^\(1!\) "))
    reported = pages.accessibility_problems(page)
    assert not reported, "\n".join(reported)
    pages.screenshot(page, f"jobs_{width}_{scheme}")
    page.get_by_role("button", name="Next").click()
    row(page, "run-59").wait_for()
    page.go_back()
    row(page, "night-shift").get_by_role("link", name="night-shift").click()
    page.locator("main[data-view=overview] h1").wait_for()
    expect(page).to_have_url(re.compile(f"^{re.escape(url)}jobs/night-shift/"))
    page.get_by_role("link", name="Jobs", exact=True).click()
    row(page, "night-shift").wait_for()


def test_jobs_are_found_and_new_steps_are_seen(url: str, runs: Path, pages) -> None:
    page = pages.open(f"{url}jobs?text=damaged")
    row(page, "run-damaged").wait_for()
    expect(page.locator("table.jobs tbody tr")).to_have_count(1)
    expect(row(page, "run-damaged")).to_contain_text("config.toml is damaged", ignore_case=True)
    page.get_by_label("Find").fill("nothing of this name")
    page.get_by_text("No matching jobs").wait_for()
    page.get_by_role("button", name="Show all").click()
    late = write_run(runs / "run-late", num_steps=10, exit_code=None, began_s=time.time())
    with held(late):
        row(page, "run-late").wait_for()
        report_steps(late, range(11, 31), loss=2.0, step_s=1.0, began_s=time.time())
        row(page, "run-late").get_by_text("30 of 240", exact=True).wait_for()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (390, "light")])
def test_two_runs_are_compared(url: str, pages, width: int, scheme: str) -> None:
    page = pages.open(f"{url}jobs?text=run-0", width=width, scheme=scheme)
    row(page, "run-00").wait_for()
    expect(page.get_by_role("button", name="Compare")).to_be_disabled()
    for name in ("run-00", "run-04"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare 2").click()
    page.locator("[data-chart=Loss] canvas").wait_for()
    expect(page).to_have_url(re.compile("compare=run-00%2Crun-04"))
    expect(page.locator("tr[data-measure='Step time']"), "1.0 s and 1.4 s").to_contain_text("+40")
    loss = page.locator("tr", has=page.get_by_role("rowheader", name="Loss up to step 40"))
    expect(loss).to_contain_text("median of the newest 20 steps")
    page.get_by_text("optimizer.lr").wait_for()
    reported = pages.accessibility_problems(page)
    assert not reported, "\n".join(reported)
    pages.screenshot(page, f"compare_{width}_{scheme}")
    copied = pages.open(page.url)
    copied.locator("[data-chart=MFU] canvas").wait_for()


@pytest.mark.parametrize("url", [VIEWER_TOKEN], indirect=True)
def test_login_holds_for_all_jobs(url: str, pages) -> None:
    pages.expected += ["401"]
    page = pages.open(url)
    page.get_by_label("Token").fill(VIEWER_TOKEN)
    page.get_by_role("button", name="Sign in").click()
    row(page, "night-shift").get_by_role("link", name="night-shift").click()
    page.locator("main[data-view=overview] h1").wait_for()
    page.get_by_role("button", name="sign out").click()
    page.get_by_label("Token").wait_for()
    expect(page.locator("main.login")).to_have_count(1)

"""Every view on answers that are laid out: what it says, in light and dark, at the widths of real screens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.canned_dashboard import CannedDashboard
from tests.helpers.canned_job import LOST_HOST, MARKUP, SLOW_HOST
from tests.helpers.waiting import wait_until

Serve = Callable[..., CannedDashboard]

# view -> what a person reads there first
VIEWS = {
    "overview": "What happens next by itself",
    "incidents": "Verdicts of the diagnosis",
    "incidents/000002": "The verdict behind it",
    "incidents/000001": "How ranks ended",
    "incidents/verdicts/v-000017": "What it says",
    "hosts": "host-000",
    f"hosts/{SLOW_HOST}": "pair-bandwidth",
    "stragglers": "Ways out",
    "logs": "What broke first",
    "checkpoints": "Branches",
    "actions": "Nothing can be asked for from this page",
    "audit": "the chain is whole",
}


def picture_name(view: str) -> str:
    return view.replace("/", "_")


@pytest.mark.parametrize("view", VIEWS)
def test_view_shows_what_it_is_for(serve: Serve, pages, view: str) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/{view}")
    page.get_by_text(VIEWS[view], exact=True).first.wait_for()
    page.locator("[data-connection=live]").wait_for()
    wait_until(lambda: page.locator(".skeleton").count() == 0, "the view is loaded", 5.0)
    assert page.locator("[role=alert]").count() == 0
    pages.screenshot(page, f"{picture_name(view)}_1440_light")


@pytest.mark.parametrize("width", [1280, 1920, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_overview_fits_screens(serve: Serve, pages, width: int, scheme: str) -> None:
    dashboard = serve(health="bad")
    page = pages.open(dashboard.url, width=width, height=width * 9 // 16, scheme=scheme)
    page.locator(".uplot canvas").first.wait_for()
    page.locator("[data-connection=live]").wait_for()
    pages.screenshot(page, f"overview_{width}_{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it has to be scrolled sideways"


@pytest.mark.parametrize("view", ["hosts", "incidents", "checkpoints", "audit", "stragglers", "logs"])
def test_no_view_is_wider_than_a_small_screen(serve: Serve, pages, view: str) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/{view}", width=1280, height=800)
    page.locator("main h1").wait_for()
    page.locator("main table, main .log-box").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_problems_come_first_and_lead_to_what_explains_them(serve: Serve, pages) -> None:
    dashboard = serve(health="bad")
    page = pages.open(dashboard.url)
    first = page.locator(".problem").first
    first.wait_for()
    assert LOST_HOST in first.inner_text()
    assert "unhealthy" in page.locator("[data-health=bad]").inner_text()
    first.get_by_role("link", name=LOST_HOST, exact=True).click()
    page.get_by_role("heading", name=LOST_HOST, exact=True).wait_for()
    assert page.url.endswith(f"#/hosts/{LOST_HOST}")


def test_good_health_is_one_calm_line(serve: Serve, pages) -> None:
    dashboard = serve(health="good")
    page = pages.open(dashboard.url)
    page.get_by_text("No problem is known.").wait_for()
    assert page.locator(".problem").count() == 0


def test_text_from_outside_is_never_markup(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/hosts/{SLOW_HOST}")
    page.get_by_text("pair-bandwidth").wait_for()
    for view, where in (
        (f"hosts/{SLOW_HOST}", "main"),
        ("incidents/000002", "main"),
        ("incidents/000001", "main"),
        ("audit", "main"),
        ("logs", ".log-box"),
    ):
        page.evaluate("view => { location.hash = `#/${view}`; }", view)
        page.locator("main").get_by_text("<b>bold</b>").first.wait_for()
        assert MARKUP.split('"')[0] in page.locator(where).inner_text()
        assert page.locator("main img, main b").count() == 0
    assert "attacked" not in page.title()


def test_a_view_that_is_not_there_says_where_to_go(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/nowhere")
    page.get_by_text("There is no such view").wait_for()
    page.get_by_role("link", name="Go to the overview").click()
    page.get_by_text("What happens next by itself").wait_for()


def test_what_is_not_known_is_said_with_a_way_out(serve: Serve, pages) -> None:
    dashboard = serve()
    pages.expected.append("404")
    page = pages.open(f"{dashboard.url}#/incidents/999999")
    alert = page.locator("[role=alert]")
    alert.wait_for()
    assert "nothing is known of incidents/999999" in alert.inner_text()
    assert "Go back to the list" in alert.inner_text()

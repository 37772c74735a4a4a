"""Every view with prepared responses: its texts, in light and dark, at the widths of real screens."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.helpers.canned_dashboard import CannedDashboard
from tests.helpers.canned_job import LOST_HOST, MARKUP, SLOW_HOST, overview_document, sources_document

Serve = Callable[..., CannedDashboard]

# view -> the first text that it shows
VIEWS = {
    "overview": "Next automatic action",
    "incidents": "Verdicts of the diagnosis",
    "incidents/000002": "Verdict",
    "incidents/000001": "How ranks ended",
    "incidents/verdicts/v-000017": "Details",
    "hosts": "host-000",
    f"hosts/{SLOW_HOST}": "pair-bandwidth",
    "stragglers": "Possible actions",
    "logs": "Root cause",
    "checkpoints": "Branches",
    "actions": "No actions available on this page",
    "audit": "hash chain intact",
}


def picture_name(view: str) -> str:
    return view.replace("/", "_")


def go_to(page, view: str) -> None:
    """Show another view on an open page, as a link to it does."""
    page.evaluate("view => { location.hash = `#/${view}`; }", view)
    page.locator(f"main[data-view={view.partition('/')[0]}] h1").wait_for()


@pytest.mark.parametrize("view", VIEWS)
def test_view_shows_its_content(serve: Serve, pages, view: str) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/{view}")
    # steps of a runbook exist before they are unfolded
    page.get_by_text(VIEWS[view], exact=True).filter(visible=True).first.wait_for()
    page.locator("[data-connection=live]").wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)
    expect(page.locator("[role=alert]")).to_have_count(0)
    pages.screenshot(page, f"{picture_name(view)}_1440_light")
    page.set_viewport_size({"width": 1280, "height": 800})
    pages.wait_until_it_fits(page)


def test_loss_by_source_shows_the_chosen_source(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/overview")
    section = page.get_by_role("region", name="Loss by source")
    expect(section.locator("figure")).to_have_attribute("data-chart", "Loss of code")
    # The source whose loss rose most is the first row.
    rows = [re.compile("code.*\\+0.12"), re.compile("books"), re.compile("web")]
    expect(section.locator("tbody tr")).to_have_text(rows)
    dashboard.responses["sources"] = sources_document("web")
    section.get_by_role("button", name="web").click()
    expect(section.locator("figure")).to_have_attribute("data-chart", "Loss of web")
    expect(section.locator("tr[aria-current=true]")).to_have_text(re.compile("web"))
    page.wait_for_function("() => location.hash.includes('source=web')")


def test_page_of_a_host_shows_loader_cache_and_producers(serve: Serve, pages) -> None:
    page = pages.open(f"{serve().url}#/hosts/{SLOW_HOST}")
    section = page.get_by_role("region", name="Data")
    expect(section).to_contain_text("steps 47,991 to 48,230")
    figures = section.locator(".figure")
    expect(figures).to_have_text(
        [
            re.compile(r"Loader reads\s*1 replica"),
            re.compile(r"Read time\s*900\sms\s*a step, at most 4\.50\ss"),
            re.compile(r"Steps ready\s*1 of 2\s*at least 0"),
            re.compile(r"Restarts\s*1"),
            re.compile(r"From the cache\s*11\.5\sMB\s*a step, 50\.3\sMB from the storage"),
            re.compile(r"Removed from the cache\s*1\.05\sMB\s*a step"),
            re.compile(r"Not stored\s*12\s*blocks, in this round"),
            re.compile(r"Wait for pictures\s*800\sms\s*a step, at most 4\.40\ss"),
        ]
    )
    expect(section.locator("dl .tone-warning")).to_have_count(3)
    waits = section.get_by_role("table", name="Waits for data").locator("tbody tr")
    expect(waits).to_have_count(8)
    expect(waits.first).to_contain_text("136")
    producers = section.get_by_role("table", name="Producers of pictures").locator("tbody tr")
    expect(producers).to_have_text(
        [
            re.compile(r"0\s*10\.0\.3\.7:7300\s*answers\s*143\s*210\sms\s*14\s*0"),
            re.compile(r"1\s*10\.0\.3\.8:7300\s*does not answer\s*12\.3\s*.*0\s*37"),
        ]
    )
    replaced = section.get_by_role("table", name="Replaced samples").locator("tbody tr")
    expect(replaced).to_contain_text(["/data/cc12m/00017.tar: 000170045.jpg (sample 170045): its file is cut off"])
    pages.wait_until_it_fits(page)


def test_overview_fits_screens(serve: Serve, pages) -> None:
    dashboard = serve(health="bad")
    page = pages.open(dashboard.url)
    page.locator(".uplot canvas").first.wait_for()
    page.locator("[data-connection=live]").wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.locator(f"html[data-theme={scheme}]").wait_for()
        for width in (1280, 1920, 3840):
            page.set_viewport_size({"width": width, "height": width * 9 // 16})
            pages.wait_until_it_fits(page)
            pages.screenshot(page, f"overview_{width}_{scheme}")


def test_problems_come_first_and_lead_to_what_explains_them(serve: Serve, pages) -> None:
    dashboard = serve(health="bad")
    page = pages.open(dashboard.url)
    first = page.locator(".reason").first
    expect(first).to_contain_text(LOST_HOST)
    expect(page.locator("[data-health=bad]")).to_contain_text("unhealthy")
    first.get_by_role("link", name=LOST_HOST, exact=True).click()
    page.get_by_role("heading", name=LOST_HOST, exact=True).wait_for()
    expect(page).to_have_url(re.compile(f"#/hosts/{LOST_HOST}$"))


def test_good_health_is_one_line(serve: Serve, pages) -> None:
    dashboard = serve(health="good")
    page = pages.open(dashboard.url)
    page.get_by_text("No problem is known.").wait_for()
    expect(page.locator(".reason")).to_have_count(0)


def test_the_three_questions_come_first(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    for place, head in enumerate(("Is it healthy?", "Is it fast?", "When does it end?")):
        expect(page.locator("main h2").nth(place)).to_have_text(head)
    expect(page.locator(".question-answer")).to_have_text(
        [re.compile(r"^\s*Needs\b"), re.compile(r"^\s*55\.1\b"), re.compile(r"^\s*in\b")]
    )


def test_each_view_begins_with_why_the_job_is_not_healthy(serve: Serve, pages) -> None:
    dashboard = serve(health="bad")
    pages.expected.append("404")
    page = pages.open(dashboard.url)
    for view in ("overview", "hosts", "heat", "logs", "audit"):
        go_to(page, view)
        reason = page.locator(".header .headline")
        expect(reason, view).to_have_text(re.compile(rf"^\s*2 reasons, first: {LOST_HOST} is lost"))
        expect(page.locator(".header [data-health=bad]"), view).to_have_count(1)
        reason.get_by_role("link").click()
        page.locator("main[data-view=overview] .question .reason").nth(1).wait_for()


def test_without_a_daemon_each_view_begins_with_an_error(serve: Serve, pages) -> None:
    views = ("overview", "hosts", "checkpoints")
    dashboard = serve(health="good")
    reported = overview_document(health="good")
    silent = reported.diagnosis.model_copy(update={"is_daemon_alive": False})
    page = pages.open(dashboard.url)
    page.locator("[data-connection=live]").wait_for()
    banner = page.get_by_test_id("no-daemon")
    for view in views:
        go_to(page, view)
        expect(banner, view).to_have_count(0)
    dashboard.responses["overview"] = reported.model_copy(update={"diagnosis": silent})
    dashboard.news("overview")
    banner.wait_for()
    for view in views:
        go_to(page, view)
        expect(banner, view).to_contain_text("The diagnostics daemon is not running")
        expect(banner, view).to_have_class(re.compile(r"\btone-bad\b"))
        assert banner.bounding_box()["y"] < page.locator("main").bounding_box()["y"], view


def test_damaged_checkpoint_is_never_green(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/checkpoints")
    row = page.get_by_role("row").filter(has_text="46,000")
    expect(row.locator(".tone-bad")).to_have_count(2)
    expect(row.locator(".tone-good")).to_have_count(0)


def test_lines_of_logs_have_the_time_of_day(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/logs")
    times = page.locator(".log-box .log-time")
    times.first.wait_for()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", text) for text in times.all_inner_texts())
    assert times.first.evaluate("one => one.scrollWidth <= one.clientWidth"), "it is cut"
    assert times.first.evaluate("one => parseFloat(getComputedStyle(one).fontSize)") >= 14
    expect(page.locator(".log-head")).to_contain_text(re.compile(r"\d{4}-\d\d-\d\d"))


@pytest.mark.parametrize("address", ["?round=1#/stragglers", "#/stragglers?round=1"])
def test_a_link_to_a_round_shows_that_round(serve: Serve, pages, address: str) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}{address}")
    expect(page.get_by_label("Round")).to_have_value("1")
    expect(page).to_have_url(re.compile(r"/#/stragglers\?round=1$"))


def test_problems_link_to_the_newest_round_incidents_to_theirs(serve: Serve, pages) -> None:
    dashboard = serve(health="bad")
    page = pages.open(f"{dashboard.url}#/overview?round=1")
    rank = page.locator(".reason").first.get_by_role("link", name=re.compile("^ranks"))
    rank.wait_for()
    expect(rank).not_to_have_attribute("href", re.compile("round="))
    page.goto(f"{dashboard.url}#/incidents/000001")
    page.locator("[data-lines=culprit]").wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)
    number = dashboard.responses["incidents/000001"].round
    links = page.locator(".war-room a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    of_rounds = [link for link in links if re.match("#/(heat|ranks|logs|timeline)", link)]
    assert {link.split("?")[0] for link in of_rounds} == {"#/heat", "#/ranks", "#/logs", "#/timeline"}
    assert all(f"round={number}" in link for link in of_rounds)


def test_text_from_outside_is_never_markup(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    page.locator("[data-connection=live]").wait_for()
    # two neighbors are different views, so that nothing of the one is taken for the other
    for view, where in (
        (f"hosts/{SLOW_HOST}", "main"),
        ("incidents/000002", "main"),
        ("audit", "main"),
        ("incidents/000001", "main"),
        ("logs", ".log-box"),
    ):
        go_to(page, view)
        page.locator("main").get_by_text("<b>bold</b>").first.wait_for()
        expect(page.locator(".skeleton"), view).to_have_count(0)
        expect(page.locator(where), view).to_contain_text(MARKUP.split('"')[0])
        expect(page.locator("main img, main b"), view).to_have_count(0)
    assert "attacked" not in page.title()


def test_an_unknown_view_links_to_the_overview(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/nowhere")
    page.get_by_text("No such view").wait_for()
    page.get_by_role("link", name="Go to the overview").click()
    expect(page.get_by_text("Next automatic action")).to_be_visible()


def test_missing_data_is_explained_with_a_hint(serve: Serve, pages) -> None:
    dashboard = serve()
    pages.expected.append("404")
    page = pages.open(f"{dashboard.url}#/incidents/999999")
    alert = page.locator("[role=alert]")
    expect(alert).to_contain_text("nothing is known of incidents/999999")
    expect(alert).to_contain_text("Go back to the list")

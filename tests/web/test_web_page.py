"""The page as a whole: keys, address, live updates, reconnection, login, actions, preferences, accessibility."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from megatrain_dashboard.api.job import RoundDocument
from tests.helpers.canned_dashboard import CannedDashboard
from tests.helpers.canned_job import JOB, NOW_S, SLOW_HOST, STEP, job_document, overview_document
from tests.helpers.waiting import wait_until

NUM_NEWS = 5
Serve = Callable[..., CannedDashboard]


def test_reported_changes_are_fetched_once_without_flicker(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    page.locator("[data-connection=live]").wait_for()
    expect(page.locator("[data-figure=step]")).to_have_text(f"{STEP:,}")
    expect(page.locator(".skeleton")).to_have_count(0)
    page.evaluate("() => { window.seen = document.querySelector('[data-figure=step]'); }")
    page.evaluate(
        """() => { window.skeletons = 0; new MutationObserver(() => {
            window.skeletons += document.querySelectorAll('.skeleton').length;
        }).observe(document.body, { childList: true, subtree: true }); }"""
    )
    dashboard.asked.clear()
    for number in range(1, NUM_NEWS + 1):
        dashboard.responses["overview"] = overview_document(step=STEP + number)
        dashboard.news("overview")
        expect(page.locator("[data-figure=step]")).to_have_text(f"{STEP + number:,}")
    # A page that polls would send more requests, and one with a broken stream would request the stream.
    assert [name for name in dashboard.asked if name in ("overview", "live")] == ["overview"] * NUM_NEWS
    assert page.evaluate("window.seen === document.querySelector('[data-figure=step]')"), "the figure was created again"
    assert page.evaluate("window.skeletons") == 0


def test_restarted_server_is_found_again(serve: Serve, pages) -> None:
    dashboard = serve()
    pages.expected += ["ERR_", "Failed to load"]
    page = pages.open(dashboard.url)
    page.locator("[data-connection=live]").wait_for()
    step = page.locator("[data-figure=step]")
    expect(step).to_have_text(f"{STEP:,}")
    dashboard.is_down = True
    page.locator("[data-connection=reconnecting]").wait_for()
    page.get_by_text("disconnected for").wait_for()
    expect(step, "known values stay").to_have_text(f"{STEP:,}")
    dashboard.responses["overview"] = overview_document(step=STEP + 7)
    dashboard.session = "second"
    dashboard.is_down = False
    page.locator("[data-connection=live]").wait_for()
    page.get_by_text(f"{STEP + 7:,}").first.wait_for()


def test_an_open_page_goes_on_to_a_new_round(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/stragglers")
    page.get_by_label("Round").wait_for()
    page.locator("[data-connection=live]").wait_for()
    dashboard.asked.clear()
    dashboard.responses["overview"] = overview_document().model_copy(
        update={"round": 3}
    )  # which no rank has reported yet
    dashboard.news("overview")
    wait_until(lambda: "job" in dashboard.asked, "the job is requested again")
    known = job_document()
    third = RoundDocument(number=3, began_unix_s=NOW_S, world_size=384, first_step=STEP, last_step=STEP)
    dashboard.responses["job"] = known.model_copy(update={"rounds": (*known.rounds, third)})
    dashboard.news("heat")
    page.get_by_text("3, the newest").wait_for(state="attached")
    expect(page.get_by_label("Round")).to_have_value("3")
    expect(page).not_to_have_url(re.compile("round"))


HIDE = """() => {
    window.sight = 'hidden';
    Object.defineProperty(document, 'visibilityState', { configurable: true, get: () => window.sight });
    document.dispatchEvent(new Event('visibilitychange'));
}"""
SHOW = "() => { window.sight = 'visible'; document.dispatchEvent(new Event('visibilitychange')); }"


def test_hidden_pages_release_their_connections(serve: Serve, pages) -> None:
    """A browser opens six connections to a server: the last of seven pages would never load."""
    dashboard = serve()
    first = pages.open(dashboard.url)
    opened = [first, *(first.context.new_page() for _ in range(6))]
    for page in opened[:-1]:
        page.goto(f"{dashboard.url}#/hosts", wait_until="domcontentloaded")
        page.locator("[data-connection=live]").wait_for()
        page.evaluate(HIDE)
    opened[-1].goto(f"{dashboard.url}#/hosts", wait_until="domcontentloaded")
    opened[-1].locator("main h1").wait_for()
    opened[-1].locator("[data-connection=live]").wait_for()
    # Changes made meanwhile appear as soon as the page is visible again.
    dashboard.responses["overview"] = overview_document(step=STEP + 9)
    dashboard.step = STEP + 9
    dashboard.news("overview")
    first.evaluate(SHOW)
    expect(first.locator(".header-step")).to_contain_text(f"{STEP + 9:,}")


def test_keys_open_views_and_help(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    page.locator("main h1").wait_for()
    for key, view in (("i", "incidents"), ("m", "hosts"), ("l", "logs"), ("c", "checkpoints"), ("s", "stragglers")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.locator(f"main[data-view={view}] h1").wait_for()
    page.keyboard.press("g")
    page.keyboard.press("m")
    page.locator("main[data-view=hosts] table").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("031")
    page.wait_for_function("() => location.hash.includes('text=031')")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")


def test_everything_is_reached_by_tab(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    page.locator("main h1").wait_for()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    reached = page.evaluate("document.activeElement.tagName")
    assert reached in ("A", "BUTTON")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus must be visible"


def test_choices_are_in_the_address_and_survive_a_reload(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/hosts")
    page.locator("tbody tr").first.wait_for()
    page.get_by_text("cordoned", exact=True).first.click()
    page.get_by_role("button", name="Step time").click()
    page.wait_for_function("() => location.hash.includes('show=cordoned') && location.hash.includes('sort=-median')")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.reload()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("th[aria-sort=descending]")).to_have_text(re.compile("^Step time"))


def test_unknown_visitor_signs_in(serve: Serve, pages) -> None:
    dashboard = serve(token="a-token-of-a-viewer")
    pages.expected.append("401")
    page = pages.open(f"{dashboard.url}#/incidents")
    field = page.get_by_label("Token")
    field.fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("This token is not known.").wait_for()
    field.fill("a-token-of-a-viewer")
    page.get_by_role("button", name="Sign in").click()
    page.locator("main[data-view=incidents] table").first.wait_for()
    page.locator("[data-connection=live]").wait_for()
    assert "a-token-of-a-viewer" not in json.dumps(page.evaluate("Object.entries(localStorage)"))


def test_disabled_actions_give_the_reason(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    page.get_by_text("Next automatic action").wait_for()
    page.get_by_text("start the dashboard with --enable-actions").wait_for()
    expect(page.locator("[data-action]")).to_have_count(0)


def test_action_needs_reason_name_and_dry_run(serve: Serve, pages) -> None:
    dashboard = serve(can_act=True)
    page = pages.open(f"{dashboard.url}#/hosts/{SLOW_HOST}")
    page.locator("[data-action=evict]").click()
    dialog = page.get_by_role("dialog")
    carry_out = dialog.locator("[data-carry-out]")
    expect(carry_out).to_be_disabled()
    dialog.get_by_label("Why?").fill("its fan is broken")
    dialog.get_by_label("Type the name of the job").fill("another-job")
    expect(carry_out).to_be_disabled()
    dialog.get_by_label("Type the name of the job").fill(JOB)
    page.keyboard.press("Enter")
    dialog.locator("[data-outcome='dry run']").wait_for()
    carry_out.click()
    dialog.locator("[data-outcome=accepted]").wait_for()
    assert [(action.kind, action.target, action.is_dry_run) for action in dashboard.actions] == [
        ("evict", SLOW_HOST, True),
        ("evict", SLOW_HOST, False),
    ]
    assert dashboard.actions[0].idempotency_key != dashboard.actions[1].idempotency_key
    expect(carry_out, "it is requested once").to_be_disabled()


def test_action_without_an_answer_is_not_called_refused(serve: Serve, pages) -> None:
    dashboard = serve(can_act=True)
    pages.expected += ["ERR_", "Failed to load"]
    page = pages.open(f"{dashboard.url}#/hosts/{SLOW_HOST}")
    page.locator("[data-action=evict]").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Why?").fill("its fan is broken")
    dialog.get_by_label("Type the name of the job").fill(JOB)
    dashboard.is_down = True
    dialog.get_by_role("button", name="Dry run").click()
    dialog.get_by_text("no answer").wait_for()
    expect(dialog.get_by_text("refused", exact=True)).to_have_count(0)


def test_only_possible_actions_are_offered_with_their_effect(serve: Serve, pages) -> None:
    dashboard = serve(can_act=True)
    page = pages.open(f"{dashboard.url}#/actions")
    page.locator("[data-action=diag-off]").click()
    page.get_by_role("dialog").get_by_text("Ranks time no operations").wait_for()
    page.keyboard.press("Escape")
    hosts = dashboard.responses["hosts"].hosts
    spare = next(one.host for one in hosts if one.first_rank is None and one.cordon_unix_s is None)
    for host, kinds in ((SLOW_HOST, ["evict", "cordon"]), (spare, ["cordon"])):
        page.goto(f"{dashboard.url}#/hosts/{host}")
        page.get_by_role("heading", name=host).wait_for()
        actions = page.locator("[data-action]")
        expect(actions).to_have_count(len(kinds))
        assert actions.evaluate_all("all => all.map(one => one.dataset.action)") == kinds


def test_without_a_checkpoint_operators_see_how_to_make_one(serve: Serve, pages) -> None:
    for can_act in (True, False):
        dashboard = serve(can_act=can_act)
        none = dashboard.responses["checkpoints"].model_copy(update={"checkpoints": ()})
        dashboard.responses["checkpoints"] = none
        page = pages.open(f"{dashboard.url}#/checkpoints")
        page.get_by_text("No checkpoint yet").wait_for()
        expect(page.get_by_text("lower checkpoint.interval")).to_have_count(int(can_act))


def test_theme_and_clock_are_kept(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/audit", scheme="dark")
    page.locator("tbody tr").first.wait_for()
    root, first = page.locator("html"), page.locator("tbody time").first
    expect(root).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Theme is system").click()
    expect(root).to_have_attribute("data-theme", "light")
    local = first.inner_text()
    page.get_by_role("button", name="Times are shown in local time").click()
    expect(first).not_to_have_text(local)
    utc = first.inner_text()
    page.reload()
    expect(root).to_have_attribute("data-theme", "light")
    expect(first).to_have_text(utc)


@pytest.mark.parametrize(
    "view", ["overview", "incidents/000002", "hosts", "stragglers", "logs", "checkpoints", "actions", "audit"]
)
def test_accessibility(serve: Serve, pages, view: str) -> None:
    dashboard = serve(health="bad", can_act=True)
    page = pages.open(f"{dashboard.url}#/{view}")
    page.locator("main h1").wait_for()
    page.locator("[data-connection=live]").wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)
    reported = pages.accessibility_problems(page)
    assert not reported, "\n".join(reported)


def test_reduced_motion_is_respected(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url, is_motion_reduced=True)
    page.locator("main h1").wait_for()
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every(one => getComputedStyle(one).animationName === 'none')"
    )

"""The page of an incident in a browser: its log lines, steps, actions, and the text for a ticket."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from playwright.sync_api import expect

from tests.helpers.canned_dashboard import CannedDashboard
from tests.helpers.canned_job import JOB, MARKUP

Serve = Callable[..., CannedDashboard]


def _copied(page, button) -> str:
    """Press a button that copies, and return the content of the clipboard. The "copied" of other buttons is not
    visible."""
    copied = page.get_by_role("button", name="copied")
    expect(copied).to_have_count(0)
    button.click()
    expect(copied).to_be_visible()
    return page.evaluate("navigator.clipboard.readText()")


def test_page_of_an_incident_shows_all_about_it(serve: Serve, pages) -> None:
    dashboard = serve(can_act=True)
    page = pages.open(f"{dashboard.url}#/incidents/000001")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("[data-lines=culprit]").wait_for()

    culprit, others = (page.locator(f"[data-lines={group}]") for group in ("culprit", "others"))
    expect(culprit.get_by_role("heading")).to_have_text("Culprit: rank 91 on host-011")
    expect(others.locator(".moment-line")).to_have_count(8)
    expect(culprit).not_to_contain_text("NCCL error")
    expect(page.locator("[data-label]")).to_have_attribute("data-label", "gpu_hardware")
    for picture in ("ranks-canvas", "heat-cells"):
        page.locator(f"[data-testid={picture}]").wait_for()
    links = page.get_by_role("link", name="open", exact=True)
    expect(links).to_have_count(2)
    opens = [urlsplit(link.get_attribute("href")).fragment for link in links.all()]
    assert all("round=1" in link for link in opens)
    assert {link.partition("?")[0] for link in opens} == {"/ranks", "/heat"}

    commands = page.locator("[data-runbook='worker-ended.md'] [data-command]")
    commands.first.wait_for()
    reported = commands.evaluate_all("all => all.map(one => one.dataset.command)")
    assert f"megatrain incidents /runs/{JOB} --id 000001" in reported
    assert _copied(page, commands.first.get_by_role("button", name="Copy")) == reported[0]

    actions = page.locator("[data-action]")
    expect(actions).to_have_count(2)
    assert actions.evaluate_all("all => all.map(one => one.dataset.action)") == ["evict", "cordon"]
    page.locator("[data-action=evict]").click()
    page.get_by_role("dialog").get_by_text("host-011").first.wait_for()
    page.keyboard.press("Escape")

    page.get_by_text("email: not notified").wait_for()
    text = _copied(page, page.get_by_role("button", name="Copy for ticket"))
    for part in (
        f"**Incident 000001 of {JOB}: a worker ended (recovered)**",
        "- culprit: host-011, rank 91 (high)",
        "**What happened (UTC)**",
        "**Evidence**\n- the log of rank 91 names the device",
        "**Log lines of rank 91 on host-011 (UTC)**\n```\n",
        "**Notifications**",
        "email: not notified that it began, after 3 tries: 535",
        f"- incident: {dashboard.url}#/incidents/000001",
        f"- logs: {dashboard.url}#/logs?round=1",
        "#/runbooks/worker-ended.md?incident=000001",
    ):
        assert part in text
    assert " UTC" in text.split("- began: ")[1].split("\n")[0]
    assert MARKUP in text, "log lines are plain text"


def test_no_action_is_offered_where_actions_are_disabled(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/incidents/000001")
    page.locator("[data-lines=culprit]").wait_for()
    expect(page.get_by_text("read-only")).to_have_count(1)
    expect(page.locator("[data-action]")).to_have_count(0)


def test_a_reason_leads_to_its_runbook(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    page.locator(".reason").first.get_by_role("link", name="runbook").click()
    page.locator("[data-runbook] [data-command]").first.wait_for()
    page.goto(f"{dashboard.url}#/runbooks")
    page.get_by_role("link", name="Hang", exact=True).click()
    expect(page.locator("[data-runbook='hang.md']")).to_be_visible()

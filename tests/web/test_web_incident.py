"""The page of an incident in a browser: its lines, steps, actions, and the text for a ticket."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from tests.helpers.canned_dashboard import CannedDashboard
from tests.helpers.canned_job import JOB, MARKUP

Serve = Callable[..., CannedDashboard]


def _copied(page) -> str:
    page.get_by_role("button", name="Copy for ticket").click()
    page.get_by_text("copied").first.wait_for()
    return page.evaluate("navigator.clipboard.readText()")


def test_an_incident_is_a_war_room(serve: Serve, pages) -> None:
    dashboard = serve(can_act=True)
    page = pages.open(f"{dashboard.url}#/incidents/000001")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("[data-lines=culprit]").wait_for()

    culprit, others = (page.locator(f"[data-lines={group}]") for group in ("culprit", "others"))
    assert culprit.get_by_role("heading").inner_text() == "Culprit: rank 91 on host-011"
    assert "NCCL error" not in culprit.inner_text()
    assert others.locator(".moment-line").count() == 8
    assert page.locator("[data-label]").get_attribute("data-label") == "gpu_hardware"
    for picture in ("grid-canvas", "heat-cells"):
        page.locator(f"[data-testid={picture}]").wait_for()
    opens = [
        urlsplit(link.get_attribute("href")).fragment
        for link in page.get_by_role("link", name="open", exact=True).all()
    ]
    assert all("round=1" in link for link in opens)
    assert {link[:5] for link in opens} == {"/grid", "/heat"}

    commands = page.locator("[data-runbook='worker-ended.md'] [data-command]")
    commands.first.wait_for()
    told = commands.evaluate_all("all => all.map(one => one.dataset.command)")
    assert f"megatrain incidents /runs/{JOB} --id 000001" in told
    commands.first.get_by_role("button", name="Copy").click()
    page.get_by_text("copied").first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == told[0]

    page.locator("[data-action]").first.wait_for()
    offered = page.locator("[data-action]").evaluate_all("all => all.map(one => one.dataset.action)")
    assert offered == ["evict", "cordon"]
    page.locator("[data-action=evict]").click()
    page.get_by_role("dialog").get_by_text("host-011").first.wait_for()
    page.keyboard.press("Escape")

    page.get_by_text("email: not told").wait_for()
    text = _copied(page)
    for part in (
        f"**Incident 000001 of {JOB}: a worker ended (recovered)**",
        "- culprit: host-011, rank 91 (high)",
        "**What happened (UTC)**",
        "**Evidence**\n- the log of rank 91 names the device",
        "**Log lines of rank 91 on host-011 (UTC)**\n```\n",
        "**Who was told**",
        "email: not told that it began, after 3 tries: 535",
        f"- incident: {dashboard.url}#/incidents/000001",
        f"- logs: {dashboard.url}#/logs?round=1",
        "#/runbooks/worker-ended.md?incident=000001",
    ):
        assert part in text
    assert " UTC" in text.split("- began: ")[1].split("\n")[0]
    assert MARKUP in text, "what a log says is text"


def test_nothing_is_offered_where_nothing_can_be_asked_for(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/incidents/000001")
    page.locator("[data-lines=culprit]").wait_for()
    assert page.locator("[data-action]").count() == 0
    assert page.get_by_text("read-only").count() == 1


def test_a_reason_leads_to_its_runbook(serve: Serve, pages) -> None:
    dashboard = serve()
    page = pages.open(dashboard.url)
    page.locator(".reason").first.get_by_role("link", name="runbook").click()
    page.locator("[data-runbook] [data-command]").first.wait_for()
    page.goto(f"{dashboard.url}#/runbooks")
    page.get_by_role("link", name="Hang", exact=True).click()
    page.locator("[data-runbook='hang.md']").wait_for()

"""The page of the recorded sample (`make dashboard-sample`): a host was slow, a rank died, a rank hung the job."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.contracts.records.record import decode
from megatrain.run_files.incidents import AUDIT_NAME, read_audit
from tests.helpers.served_run import served_run
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import wait_until

SAMPLE = ROOT / "tests" / "golden" / "dashboard-sample"
INCIDENTS = {
    one.kind: one
    for path in sorted((SAMPLE / "incidents").glob("*.json"))
    for one in (decode(Incident, path.read_bytes(), path.name),)
}
SLOW, DIED, HUNG = (INCIDENTS[kind] for kind in (IncidentKind.STRAGGLER, IncidentKind.FAILURE, IncidentKind.HANG))
VERDICT = read_audit(SAMPLE / "incidents" / AUDIT_NAME)[0][0].outcome.verdict_id
# address -> a text that it shows
VIEWS = {
    "overview": "nded: all 300 steps are done",
    "incidents": "hosts made the job slow",
    f"incidents/{SLOW.incident_id}": "gain over the rest of the job",
    f"incidents/{DIED.incident_id}": "How ranks ended",
    f"incidents/{HUNG.incident_id}": "rank 3 is stopped (T) in backward-recv",
    f"incidents/verdicts/{VERDICT}": "cost of a restart",
    "hosts": "last in round 1",
    "hosts/host-1": "About this host",
    "heat": "Outliers",
    f"heat?round={SLOW.round}&scale=z&by=host": "Outliers",
    "timeline": "slices of 8 ranks",
    f"timeline?round={SLOW.round}&ideal=1&critical=1": "without stragglers",
    "ranks": "in step: 8",
    f"ranks?round={HUNG.round}&rank=3": "process is stopped (T)",
    f"stragglers?round={SLOW.round}": "host-1",
    "stragglers": "Slowdown by stragglers (what-if)",
    "logs": "Lines",
    "checkpoints": "pinned: starting point of the evaluation",
    "actions": "No actions available on this page",
    "audit": "hash chain intact",
}
"""Parts of texts."""
CHECKED_BY_AXE = (
    "overview", "incidents", "heat", "timeline", "checkpoints",
    f"ranks?round={HUNG.round}&rank=3", f"stragglers?round={SLOW.round}",
)  # fmt: skip
"""Together they have every part of the page that the sample fills."""
SCREENS = ((1440, 900), (1280, 800), (1920, 1080), (3840, 2160))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_run(SAMPLE) as found:
        yield found


def expect_loaded(page, text: str) -> None:
    page.get_by_text(text).first.wait_for(state="attached")
    expect(page.locator(".skeleton")).to_have_count(0)
    expect(page.locator("[role=alert]")).to_have_text([])


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_the_sample_fits_every_screen(url: str, pages, view: str) -> None:
    page = pages.open(f"{url}#/{view}")
    expect_loaded(page, VIEWS[view])
    reported = pages.accessibility_problems(page) if view in CHECKED_BY_AXE else []
    assert not reported, "\n".join(reported)
    for width, height in SCREENS:
        page.set_viewport_size({"width": width, "height": height})
        pages.wait_until_it_fits(page)
        cut = page.evaluate(_CUT)
        assert not cut, (width, cut)
        pages.screenshot(page, f"sample_{width}_{view.replace('/', '_').replace('?', '_')}")


_CUT = """
() => [...document.querySelectorAll("main table, main dl, main p, main h1, main h2")]
  .filter((one) => one.getBoundingClientRect().width > 0 && !one.closest(".visually-hidden"))
  .filter((one) => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((one) => one.outerHTML.slice(0, 120))
"""


def test_the_culprit_of_the_hang_is_named_in_the_picture(url: str, pages) -> None:
    page = pages.open(f"{url}#/ranks?round={HUNG.round}")
    canvas = page.get_by_test_id("ranks-canvas")
    canvas.wait_for()
    expect(canvas).to_have_attribute("data-marks", "1")  # the culprit
    expect(canvas).to_have_attribute("data-arrows", re.compile("^[1-9]"))
    page.get_by_text("Blocked by 1 rank").wait_for()


def test_ranks_of_a_small_job_are_drawn_with_text(url: str, pages) -> None:
    page = pages.open(f"{url}#/ranks", width=1440, height=900)
    canvas = page.get_by_test_id("ranks-canvas")
    canvas.wait_for()
    expect(canvas).to_have_attribute("data-cards", "8")  # ranks that are drawn with text
    expect(canvas).to_have_attribute("data-ranks", "8")
    stages = 2
    assert float(canvas.get_attribute("data-cell")) * stages > 0.8 * canvas.bounding_box()["width"]


def test_the_timeline_has_a_legend_of_what_is_in_it(url: str, pages) -> None:
    page = pages.open(f"{url}#/timeline")
    legend = page.get_by_test_id("timeline-legend")
    for named in (r"F\s*forward-compute", r"B\s*backward-compute", "grads-reduce-scatter"):
        expect(legend).to_have_text(re.compile(named))


def test_serving_the_sample_changes_no_file(url: str, pages) -> None:
    before = {path: path.stat().st_mtime_ns for path in SAMPLE.rglob("*")}
    page = pages.open(f"{url}#/logs")
    expect_loaded(page, "Lines")
    assert {path: path.stat().st_mtime_ns for path in SAMPLE.rglob("*")} == before


def test_unknown_steps_are_shown_as_unknown(url: str, pages) -> None:
    page = pages.open(f"{url}#/heat?from=9999")
    page.get_by_text("No recorded steps in this range").wait_for()
    page.get_by_text("steps 160 to 299").wait_for()
    page.get_by_role("button", name="Change").click()
    for end in ("from", "to"):
        page.get_by_label(end, exact=True).fill("200")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_text("8 ranks, steps 200 to 200")).to_be_visible()


def test_unknown_round_is_shown_as_unknown(url: str, pages) -> None:
    page = pages.open(f"{url}#/stragglers?round=99")
    page.get_by_role("button", name="no records of round 99; the newest is shown").click()
    expect(page).to_have_url(f"{url}#/stragglers")


def test_verdict_of_another_round_is_not_shown_for_this_one(url: str, pages) -> None:
    page = pages.open(f"{url}#/stragglers?round={SLOW.round}")
    findings = page.get_by_text("computes 119.5 ms a step longer")
    findings.wait_for()
    held = []
    page.route("**/api/v1/stragglers*", lambda route: held.append(route))
    page.get_by_label("Round").select_option("4")
    expect(page).to_have_url(re.compile("#/stragglers$"))  # The newest round is requested,
    expect(page.locator(".skeleton").first).to_be_visible()  # and its response is awaited.
    expect(findings).to_have_count(0)
    wait_until(lambda: page.evaluate("1") == 1 and bool(held), "the request")
    held[0].continue_()
    page.get_by_text("No rank is slower than its peers").wait_for()


@pytest.mark.parametrize("view", [f"ranks?round={HUNG.round}", f"stragglers?round={SLOW.round}"])
def test_page_zoomed_to_twice_its_size_fits_the_screen(url: str, pages, view: str) -> None:
    page = pages.open(f"{url}#/{view}", width=720, height=450)
    page.get_by_role("button", name="is shown; show the newest").wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)
    pages.wait_until_it_fits(page)

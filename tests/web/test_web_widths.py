"""The page of the recorded sample on narrow and very wide screens: nothing scrolls sideways, no space is left empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.contracts.records.record import decode
from tests.helpers.served_run import served_run
from tests.helpers.source_tree import ROOT

SAMPLE = ROOT / "tests" / "golden" / "dashboard-sample"
NARROW_PX = 390
NUM_RANKS = 8
DIED = next(
    one
    for path in sorted((SAMPLE / "incidents").glob("*.json"))
    for one in (decode(Incident, path.read_bytes(), path.name),)
    if one.kind is IncidentKind.FAILURE
)
VIEWS_WITH_TABLES = ["incidents", f"incidents/{DIED.incident_id}", "hosts", "heat", "checkpoints", "audit"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_run(SAMPLE) as found:
        yield found


def _loaded(page) -> None:
    page.locator("main h1").wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)


def _too_wide(page) -> list[str]:
    """Return the elements that are wider than their place: boxes of tables, and the page itself."""
    return page.evaluate(
        "() => [document.documentElement, ...document.querySelectorAll('.table-box')]"
        ".filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.className || one.tagName)"
    )


@pytest.mark.parametrize("view", VIEWS_WITH_TABLES)
def test_no_table_scrolls_sideways_on_a_telephone(url: str, pages, view: str) -> None:
    page = pages.open(f"{url}#/{view}", width=NARROW_PX, height=844)
    _loaded(page)
    page.locator(".table-box tbody tr").first.wait_for()
    assert _too_wide(page) == []
    reported = pages.accessibility_problems(page)
    assert not reported, "\n".join(reported)


def test_narrow_rows_are_blocks_that_name_each_value(url: str, pages) -> None:
    page = pages.open(f"{url}#/checkpoints", width=NARROW_PX, height=844)
    _loaded(page)
    box = page.locator(".table-box.is-blocks")
    box.wait_for()
    label = "(cell) => getComputedStyle(cell, '::before').content"
    assert box.locator("td").nth(0).evaluate(label) == '"Step"'
    page.set_viewport_size({"width": 1440, "height": 900})
    box.wait_for(state="detached")
    page.get_by_role("columnheader", name="Size").wait_for()


@pytest.mark.parametrize("view", ["overview", f"stragglers?round={DIED.round}"])
def test_the_header_has_two_lines_at_most(url: str, pages, view: str) -> None:
    page = pages.open(f"{url}#/{view}", width=NARROW_PX, height=844)
    _loaded(page)
    line = "parseFloat(getComputedStyle(document.querySelector('.header .button')).minHeight)"
    assert page.locator(".header").bounding_box()["height"] <= 2 * page.evaluate(line) + 28
    expect(page.locator(".header-step")).to_be_visible()
    expect(page.locator(".header .headline")).to_be_visible()


def test_the_views_are_a_menu_on_a_telephone(url: str, pages) -> None:
    page = pages.open(f"{url}#/overview", width=NARROW_PX, height=844)
    _loaded(page)
    link = page.get_by_role("link", name="Checkpoints", exact=True)
    expect(link).to_be_hidden()
    menu = page.get_by_role("button", name="Overview")
    menu.click()
    link.click()
    page.locator("main[data-view=checkpoints] h1").wait_for()
    expect(link).to_be_hidden()


@pytest.mark.parametrize(("width", "num_cards", "num_letters"), [(1440, NUM_RANKS, 0), (1920, 0, NUM_RANKS)])
def test_the_small_grid_of_an_incident_shows_rank_and_host(
    url: str, pages, width: int, num_cards: int, num_letters: int
) -> None:
    page = pages.open(f"{url}#/incidents/{DIED.incident_id}", width=width)
    grid = page.locator(f"canvas[data-testid=ranks-canvas][data-ranks='{NUM_RANKS}']")
    expect(grid).to_have_attribute("data-cards", str(num_cards))
    expect(grid).to_have_attribute("data-letters", str(num_letters))


def test_ranks_of_a_small_job_fill_a_wide_screen(url: str, pages) -> None:
    page = pages.open(f"{url}#/ranks", width=3840, height=2160)
    grid = page.locator(f"canvas[data-testid=ranks-canvas][data-ranks='{NUM_RANKS}']")
    grid.wait_for()
    two_stages = 2 * float(grid.get_attribute("data-cell"))
    assert two_stages > 0.9 * grid.bounding_box()["width"]

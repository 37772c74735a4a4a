"""The common range of all views, the axis of time, marks and notes, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from megatrain.run_files.action_log import ActionLog
from megatrain.run_files.config_changes import CHANGES_NAME, ChangedKey, ConfigChange, append_change
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.jobs.notes import Author, NoteWriter, log_path
from tests.helpers.canned_job import SLOW_HOST
from tests.helpers.recorded_run import FAILED_S, end_s, write_recorded_run
from tests.helpers.served_run import served_run


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a recorded run with notes of people, and with a changed configuration."""
    run = RunDirectory(tmp_path_factory.mktemp("noted"))
    write_recorded_run(run.root)
    writer = NoteWriter(ActionLog(log_path(run.root)))
    writer.add("learning rate lowered", Author("ada", "operator"), step=100)
    writer.add("a cable was pulled", Author("bob", "operator"), at_unix_s=FAILED_S)
    key = ChangedKey("optimizer.lr", "0.0003", "0.001")
    append_change(run.diagnosis / CHANGES_NAME, ConfigChange(2, 50, end_s(2, 50), (key,)))
    with served_run(run.root) as found:
        yield found


def test_range_applies_to_all_views(url: str, pages) -> None:
    page = pages.open(url)
    loss = page.locator("[data-chart='Loss']")
    expect(loss).to_be_visible()
    page.get_by_role("group", name="Range of all views").get_by_text("time", exact=True).click()
    expect(loss).to_have_attribute("data-axis", "time")
    box = loss.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 30, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=2\d\d\d-\d\d-\d\dT.*to=2\d\d\d-.*"))
    page.get_by_role("link", name="Incidents").first.click()
    expect(page.get_by_text("No incident in this range")).to_be_visible()
    page.get_by_role("button", name="Show all").click()
    expect(page.get_by_role("table", name="Incidents")).to_be_visible()
    expect(page.get_by_text("a cable was pulled")).to_be_visible()
    page.get_by_role("combobox", name="Range").select_option("custom")
    page.get_by_label("from", exact=True).fill("nonsense")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("neither a step nor a time")
    page.get_by_label("from", exact=True).fill("100")
    page.get_by_label("from", exact=True).press("Enter")
    expect(page).to_have_url(re.compile("from=100"))
    page.get_by_role("link", name="Overview").click()
    expect(loss).to_have_attribute("data-axis", "time")


def test_marks_describe_their_event_and_link_to_it(url: str, pages) -> None:
    page = pages.open(url)
    note = page.locator("[data-chart='Loss'] [data-mark='note'][title*='ada:']")
    expect(note).to_be_visible()
    expect(note).to_have_attribute("title", re.compile("ada: learning rate lowered"))
    page.get_by_role("group", name="Marks on the charts").get_by_text("notes").click()
    expect(page.locator("[data-mark='note']")).to_have_count(0)
    page.get_by_text("as a list").click()
    page.get_by_role("link", name=re.compile("began with optimizer.lr=0.001")).click()
    expect(page.get_by_text("0.0003", exact=True)).to_be_visible()
    expect(page.get_by_text("learning rate lowered")).to_be_visible()
    expect(page.get_by_role("button", name="Add a note")).to_have_count(0)


def test_an_operator_writes_a_note(serve, pages) -> None:
    dashboard = serve(can_act=True)
    page = pages.open(f"{dashboard.url}#/notes")
    expect(page.get_by_role("table", name="Notes").get_by_text("switch 4 was replaced <img")).to_be_visible()
    page.get_by_role("button", name="Add a note").click()
    page.get_by_label(re.compile("What happened")).fill("looks well")
    place = page.get_by_role("textbox", name=re.compile("Where"))
    place.fill("some day")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("neither a step nor a time")
    assert not pages.accessibility_problems(page)
    place.fill("1,200")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    (sent,) = dashboard.notes
    assert (sent.text, sent.step, sent.at_unix_s) == ("looks well", 1200, None)


def test_relative_range_moves_with_the_clock(serve, pages) -> None:
    dashboard = serve()
    page = pages.open("about:blank")
    page.clock.install()
    page.goto(f"{dashboard.url}#/overview?from=-15m")
    page.locator("[data-chart='Loss'] canvas").first.wait_for()
    page.locator("main[data-connection=live]").wait_for()
    with page.expect_request(re.compile(r"/series\?.*from=-15m")):
        page.clock.fast_forward(25_000)


def test_range_selected_on_the_heat_map_holds_for_all_views(serve, pages) -> None:
    pages.expected += ["404"]  # No cell of the picture is laid out.
    page = pages.open(f"{serve().url}#/heat?from=19950&to=19999")
    bar = page.get_by_role("group", name="Range of all views")
    expect(bar).to_contain_text("step 19,950 to step 19,999")
    above = page.get_by_test_id("heat-above")
    box = above.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.5)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.5, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d+.*to=\d+"))
    expect(page).not_to_have_url(re.compile("from=19950"))
    expect(bar).to_contain_text(re.compile(r"step [\d,]+ to step"))
    bar.get_by_role("button", name="Show all").click()
    expect(page).not_to_have_url(re.compile("from="))


def test_the_page_of_a_host_shows_its_devices_in_the_range(serve, pages) -> None:
    pages.expected += ["404"]  # No device of it is laid out.
    page = pages.open("about:blank")
    with page.expect_request(re.compile(rf"/hosts/{SLOW_HOST}/devices\?.*from=-1h")):
        page.goto(f"{serve().url}#/hosts/{SLOW_HOST}?from=-1h")


def test_views_without_a_range_hide_or_explain_it(serve, pages) -> None:
    dashboard = serve()
    page = pages.open(f"{dashboard.url}#/incidents?from=-1h")
    bar = page.get_by_role("group", name="Range of all views")
    expect(bar).to_be_visible()
    page.goto(f"{dashboard.url}#/incidents/000001?from=-1h")
    note = page.get_by_role("list").get_by_text("switch 4 was replaced")
    expect(note).to_be_visible()
    expect(bar).to_have_count(0)
    page.goto(f"{dashboard.url}#/hosts?from=-1h")
    expect(bar).to_contain_text("as they are now")

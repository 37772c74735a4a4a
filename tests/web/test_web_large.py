"""The page with 12,288 ranks of 1,536 hosts: only visible rows are drawn, and one slow rank is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Ranks, StepTotals, Values
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.served_run import served_run
from tests.helpers.synthetic_steps import SyntheticJob

LAYOUT = Layout(dp_size=192, pp_size=8, tp_size=8)
SLOW_RANK = 7770
NUM_STEPS = 16


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the history of a large job."""
    run = RunDirectory(tmp_path_factory.mktemp("large"))
    run.create()
    job = SyntheticJob(LAYOUT, ranks_per_host=8, compute_factor={SLOW_RANK: 1.4})
    with SegmentStore(run.events) as store:
        store.append(Ranks, to_arrow(job.ranks()))
        for step in range(NUM_STEPS):
            totals, values = job.step(step)
            store.append(StepTotals, to_arrow(totals))
            store.append(Values, to_arrow(values))
        store.commit()
    with served_run(run.root) as found:
        yield found


def test_large_table_of_hosts_draws_only_visible_rows(url: str, pages) -> None:
    page = pages.open(f"{url}#/hosts")
    page.locator("table[aria-rowcount='1537']").wait_for()
    page.get_by_role("link", name="host-0", exact=True).wait_for()
    assert page.locator("tbody tr").count() < 120
    page.locator(".table-box").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    page.get_by_role("link", name="host-1535", exact=True).wait_for()
    page.get_by_label("Find").fill("host-971")
    page.get_by_role("link", name="host-971", exact=True).wait_for()
    expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.parametrize("view", ["overview", "heat", "ranks", "stragglers"])
def test_view_of_a_large_job(url: str, pages, view: str) -> None:
    pages.expected.append("404")  # No step of it was recorded in full.
    page = pages.open(f"{url}#/{view}", width=1920, height=1080)
    page.locator("main h1").wait_for()
    expect(page.locator(".skeleton")).to_have_count(0)
    expect(page.locator("[role=alert]")).to_have_text([])
    if view in ("heat", "ranks"):
        page.locator("main canvas").first.wait_for()
    if view == "stragglers":
        page.get_by_text(f"rank {SLOW_RANK}").first.wait_for()
    pages.screenshot(page, f"large_{view}_1920")

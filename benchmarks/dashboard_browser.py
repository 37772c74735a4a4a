"""The time that a browser needs for the pictures, the lists and the news of the largest job. Debian's chromium has no
GPU, so the times of pictures are upper bounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from playwright.sync_api import Page, ViewportSize, sync_playwright

CHROMIUM = "/usr/bin/chromium"
_SIZE: ViewportSize = {"width": 1920, "height": 1080}
_NUM_PAINTS = 15
_NUM_FRAMES = 120
_NUM_SEARCHES = _NUM_NEWS = 15
_OPERATIONS = ("backward-compute", "optimizer", "data-wait", "grads-reduce-scatter", "step")
_MEASURES = ("sum", "max", "count")
"""The server does not send an unchanged picture again, so each combination is requested once."""
_TIMING = """
() => {
  const canvas = document.querySelector("canvas[data-testid=heat-cells]");
  const asked = performance.getEntriesByType("resource").filter((one) => one.name.includes("/api/v1/heat?")).at(-1);
  const paintedAt = Number(canvas?.dataset.paintedAt ?? -1);
  return asked === undefined || paintedAt < asked.responseEnd ? null : {
    paintedMs: Number(canvas.dataset.paintedMs),
    shownMs: paintedAt - asked.responseEnd,
    answerMs: asked.responseEnd - asked.requestStart,
    bytes: asked.transferSize,
  };
}
"""
_OPEN_HASH = "(hash) => { performance.clearResourceTimings(); location.hash = hash; }"
_SEARCH = """
([text, rows]) => new Promise((resolve) => {
  const field = document.querySelector("main input[type=search]");
  const isShown = () => document.querySelectorAll("main tbody tr").length === rows;
  const asked = performance.now();
  const observer = new MutationObserver(() => {
    if (isShown()) { observer.disconnect(); resolve(performance.now() - asked); }
  });
  observer.observe(document.querySelector("main"), { childList: true, subtree: true });
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, text);
  field.dispatchEvent(new InputEvent("input", { bubbles: true }));
})
"""
_WATCH_STEP = """
() => {
  const figure = document.querySelector("[data-figure=step]");
  window.shownAt = {};
  new MutationObserver(() => { window.shownAt[figure.textContent.replaceAll(",", "")] = Date.now() / 1000; })
    .observe(figure, { childList: true, characterData: true, subtree: true });
}
"""
_PAN_FRAMES = """
async ([canvas, frames]) => {
  const box = canvas.getBoundingClientRect();
  const at = (type, x) => canvas.dispatchEvent(new PointerEvent(type, {
    bubbles: true, pointerId: 1, isPrimary: true, button: 0, buttons: 1, clientX: x, clientY: box.top + 200 }));
  const next = () => new Promise(requestAnimationFrame);
  const took = [], intervals = [];
  let x = box.left + box.width / 2;
  at("pointerdown", x);
  let before = await next();
  for (let frame = 0; frame < frames; frame++) {
    x += frame % 40 < 20 ? 6 : -6;
    at("pointermove", x);
    const now = await next();
    intervals.push(now - before);
    before = now;
    took.push(Number(canvas.dataset.paintedMs));
  }
  at("pointerup", x);
  return { took, intervals };
}
"""


@contextmanager
def opened_page() -> Iterator[Page]:
    """Yield a page of a browser, which stays open during the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(viewport=_SIZE).new_page()
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def heat_figures(page: Page, url: str, query: str) -> dict[str, float]:
    """Return the ms of painting, the ms from the answer's last byte to the picture, and the answer's ms and bytes.

    These are medians of several requests of an open page. `opening_ms` is from the last byte to the picture in a page
    that is opened for it. Everything that the page does after the last byte counts, including frames that it waits for.
    """
    found, opening = [], []
    for _ in range(_NUM_PAINTS):
        page.goto("about:blank")
        page.goto(f"{url}#/heat?{query}&operation=forward-compute")
        opening.append(_timing(page)["shownMs"])
    for operation, measure in product(_OPERATIONS, _MEASURES):
        page.evaluate(_OPEN_HASH, f"#/heat?{query}&operation={operation}&measure={measure}")
        found.append(_timing(page))
    found, opening = found[1:], opening[1:]  # the first one compiles
    return {
        "painted_ms": statistics.median(one["paintedMs"] for one in found),
        "shown_ms": statistics.median(one["shownMs"] for one in found),
        "opening_ms": statistics.median(opening),
        "answer_ms": statistics.median(one["answerMs"] for one in found),
        "bytes": max(one["bytes"] for one in found),
    }


def _timing(page: Page) -> dict[str, float]:
    """Wait for the picture that was requested last, and return its times."""
    timing: dict[str, float] = page.wait_for_function(_TIMING).json_value()
    return timing


def pan_figures(page: Page, url: str, query: str) -> dict[str, Any]:
    """Return the number of slices of the timeline, and the ms of frames while it is dragged: medians and the worst."""
    page.goto("about:blank")
    page.goto(f"{url}#/timeline?{query}")
    canvas = page.locator("canvas[data-testid=timeline-canvas]")
    page.wait_for_function("() => document.querySelector('canvas[data-testid=timeline-canvas]')?.dataset.paintedMs")
    found = page.evaluate(_PAN_FRAMES, [canvas.element_handle(), _NUM_FRAMES])
    return {
        "slices": int(str(canvas.get_attribute("data-slices"))),
        "painted_ms": statistics.median(found["took"]),
        "worst_ms": max(found["took"]),
        "interval_ms": statistics.median(found["intervals"]),
    }


def search_ms(page: Page, url: str, hosts: Iterator[str]) -> float:
    """Return the median ms from a host's name in the list's search field to a list of that one row."""
    page.goto(f"{url}#/hosts")
    page.locator("main tbody tr").nth(20).wait_for()
    found = []
    for _ in range(_NUM_SEARCHES):
        found.append(page.evaluate(_SEARCH, [next(hosts), 1]))
        page.locator("main input[type=search]").fill("")
        page.locator("main tbody tr").nth(20).wait_for()
    return statistics.median(found)


def news_ms(page: Page, url: str, put_step: Callable[[int], None], first_step: int) -> list[float]:
    """Return the ms from a step that is in etcd to that step on the open page, of several steps.

    put_step: writes the record from which on the job has completed that step.
    """
    page.goto(url)
    page.locator("main[data-connection=live]").wait_for()
    page.locator("[data-figure=step]").wait_for()
    page.evaluate(_WATCH_STEP)
    found = []
    for step in range(first_step, first_step + _NUM_NEWS):
        put_step(step)
        known_s = time.time()
        shown_s = page.wait_for_function("(step) => window.shownAt[step]", arg=str(step)).json_value()
        found.append(max(0.0, shown_s - known_s) * 1e3)
    return found

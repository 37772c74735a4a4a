"""A real browser: Debian's chromium, driven by Playwright, which downloads nothing. No page of a test may leave
localhost.

If MEGATRAIN_SCREENSHOTS names a directory, the screenshots of a run are written there. Otherwise none is taken: no test
reads them, and they take time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.helpers.canned_analyses import analysis_responses
from tests.helpers.canned_dashboard import CannedDashboard, canned_dashboard
from tests.helpers.canned_job import job_responses
from tests.helpers.canned_pictures import picture_responses
from tests.helpers.canned_records import record_responses
from tests.helpers.require import require, require_module
from tests.helpers.waiting import DEADLINE_S

CHROMIUM = "/usr/bin/chromium"
_DEADLINE_MS = 1000 * DEADLINE_S
_LOCAL = ("127.0.0.1", "localhost", "::1")
_RULES = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
_RULES_OF_COLORS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
"""Those of _RULES whose result depends on the theme, which changes no element of the page."""


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """One browser for all tests; each test has a separate context."""
    require("chromium", Path(CHROMIUM).exists(), f"no {CHROMIUM}; make ci-deps installs it")
    playwright = require_module("playwright.sync_api")
    playwright.expect.set_options(timeout=_DEADLINE_MS)
    with playwright.sync_playwright() as started:
        arguments = ["--disable-gpu", "--font-render-hinting=none"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # chromium refuses to run as root with a sandbox
        opened = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


class Pages:
    """Opens pages and records their problems: script errors, refused parts, requests that leave this machine."""

    def __init__(self, browser: object, screenshots: Path | None) -> None:
        self._browser = browser
        self._contexts: list[object] = []
        self.screenshots = screenshots
        self.problems: list[str] = []
        self.expected: list[str] = []
        """Parts of problems that a test causes on purpose."""

    def open(
        self,
        url: str,
        *,
        width: int = 1440,
        height: int = 900,
        scheme: str = "light",
        is_motion_reduced: bool = False,
    ) -> object:
        """Open a page in a separate context."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            timezone_id="Europe/Berlin",
            locale="en-GB",
            reduced_motion="reduce" if is_motion_reduced else "no-preference",
        )
        context.set_default_timeout(_DEADLINE_MS)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.problems.append(f"mistake: {error}"))
        page.on("console", self._console)
        page.on("request", self._request)
        page.goto(url, wait_until="domcontentloaded")
        return page

    def _console(self, message: object) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _request(self, request: object) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.hostname not in _LOCAL:
            self.problems.append(f"request to {request.url}")

    def wait_until_it_fits(self, page: object) -> None:
        """Return when the page is not wider than its screen."""
        page.wait_for_function("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")

    def accessibility_problems(self, page: object) -> list[str]:
        """Return what axe finds against WCAG 2.1 A and AA in the light theme, and of colors in the dark one."""
        axe = require_module("axe_playwright_python.sync_playwright").Axe()
        problems: list[str] = []
        for theme, rules in (("light", _RULES), ("dark", _RULES_OF_COLORS)):
            page.emulate_media(color_scheme=theme)
            page.locator(f"html[data-theme={theme}]").wait_for()
            found = axe.run(page, options={"runOnly": rules, "resultTypes": ["violations"]})
            problems += [
                f"{theme}: {one['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:300]}"
                for one in found.response["violations"]
                for node in one["nodes"][:3]
            ]
        return problems

    def screenshot(self, page: object, name: str) -> None:
        """Write a screenshot, if a directory for screenshots is named."""
        if self.screenshots is not None:
            page.screenshot(path=self.screenshots / f"{name}.png")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture(scope="session")
def screenshots() -> Path | None:
    named = os.environ.get("MEGATRAIN_SCREENSHOTS", "")
    if not named:
        return None
    directory = Path(named)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture
def pages(browser: object, screenshots: Path | None) -> Iterator[Pages]:
    """Pages of one test. Fails the test if one of them had a problem that the test did not expect."""
    opened = Pages(browser, screenshots)
    yield opened
    opened.close()
    problems = [problem for problem in opened.problems if not any(part in problem for part in opened.expected)]
    assert not problems, "\n".join(problems)


@pytest.fixture
def serve() -> Iterator[Callable[..., CannedDashboard]]:
    """Return a function that serves the page with prepared responses: serve(health="bad", can_act=True,
    token="...")."""
    opened = []

    def begin(*, health: str = "warning", can_act: bool = False, **changes: object) -> CannedDashboard:
        responses = {**job_responses(health=health, can_act=can_act), **record_responses(), **analysis_responses()}
        responses.update(picture_responses())
        opened.append(canned_dashboard(responses, **changes))
        return opened[-1].__enter__()

    yield begin
    for one in reversed(opened):
        one.__exit__(None, None, None)

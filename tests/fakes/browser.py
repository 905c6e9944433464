"""Debian's Chromium, controlled as by a user, and the errors of the page."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from playwright.sync_api import Browser, BrowserContext, CDPSession, Locator, Page, expect, sync_playwright

# The headless shell is the browser's engine without its windows and services. It takes a quarter less CPU time than the whole
# browser, so it is preferred.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
# Root cannot use Chromium's sandbox, so the sandbox is off. Background requests of Chromium itself are off, because they would be
# refused.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
WITHIN_MS = 1e3 * DEADLINE_S
SCREENSHOTS = Path(os.environ.get("PAGE_SCREENSHOTS", Path(__file__).parents[2] / "build" / "screenshots"))

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: chromium-headless-shell)"
)
expect.set_options(timeout=WITHIN_MS)


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """One browser with an empty profile; `flags` are further options of its command line."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A first visit to the page of one experiment."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        """`options`: Playwright's context options, such as color_scheme and viewport."""
        self.context: BrowserContext = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **options}
        )
        self.context.set_default_timeout(WITHIN_MS)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        """Uncaught errors of the page's scripts."""
        self.asked: list[str] = []
        """Every address that the page requested."""
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self._cdp: CDPSession = self.context.new_cdp_session(self.page)

    def enter(self, link: str) -> None:
        """Open a login link and wait until the experiment is shown."""
        self.page.goto(link)
        self.is_ready()

    def go(self, url: str) -> None:
        """Load another address."""
        self.page.goto(url)
        self.is_ready()

    def is_ready(self) -> None:
        """Wait until the page has rendered."""
        self.page.locator("html[data-ready=true]").wait_for(state="attached")

    def see(self, name: str) -> Locator:
        """The element of the page with this data-test name."""
        return self.page.locator(f'[data-test="{name}"]')

    def evaluate(self, expression: str) -> Any:
        """The awaited value of an expression in the page. Uses CDP, since the page's policy forbids
        Playwright's method.
        """
        answer = self._cdp.send(
            "Runtime.evaluate", {"expression": expression, "awaitPromise": True, "returnByValue": True}
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def heap_bytes(self) -> int:
        """The heap of the page's scripts after garbage collection."""
        for _ in range(2):
            self._cdp.send("HeapProfiler.collectGarbage")
        return int(self._cdp.send("Runtime.getHeapUsage")["usedSize"])

    def elements(self) -> int:
        """The number of elements in the document."""
        return int(self.evaluate("document.getElementsByTagName('*').length"))

    def faults_for_assistive_technology(self, rules: Sequence[str] = ()) -> list[str]:
        """Serious and critical findings of axe-core, one line each. `rules`: the rules to check; all if empty."""
        import axe_playwright_python

        if self.evaluate("typeof axe") == "undefined":
            self.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text())
        options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
        run = f"axe.run(document, {json.dumps(options)})"
        found = json.loads(self.evaluate(f"{run}.then((found) => JSON.stringify(found.violations))"))
        return [
            f"{each['impact']}: {each['id']}: {each['help']}: {node['html'][:200]}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def screenshot(self, name: str) -> None:
        """Save a screenshot."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@contextlib.contextmanager
def visit(browser: Browser, link: str, **options: Any) -> Iterator[Visit]:
    """A visit that starts with a login link."""
    visiting = Visit(browser, **options)
    try:
        visiting.enter(link)
        yield visiting
    finally:
        visiting.context.close()
    assert visiting.errors == []
    origin = link.partition("/enter")[0]
    assert [url for url in visiting.asked if not url.startswith((origin, "data:", "blob:"))] == []

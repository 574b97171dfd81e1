"""A real browser for the live page: Debian's chromium under Playwright. Without one these tests are skipped."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 30_000  # generous: the machine may be busy


# Not for the session: while Playwright runs, the main thread has an event loop, and no other test could start one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path")
    with playwright_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """`open_page(url, **context options)`; the test fails on any script error or breach of the content policy."""
    contexts, faults = [], []

    def opened(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        # A refused request is logged as "Failed to load resource"; the tests provoke those.
        page.on("console", lambda m: m.type == "error" and "Failed to load" not in m.text and faults.append(m.text))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []

"""A real browser, and a console over a stub engine for it to open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.console_service import ConsoleService, console_service
from tests.fakes.stub_backend import StubDelays

READY = "() => document.getElementById('service')?.textContent !== 'Asking the service…'"
"""Whether the page has heard from the gateway. Pages that ask none are ready at once."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Skips where Playwright or a Chromium is not installed. Ends with its module: Playwright keeps a loop
    running in this thread, in which no other test could begin one."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, or name one in $CHROMIUM")
    with api.sync_playwright() as playwright:
        # In a container there are no namespaces for Chromium's own sandbox.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def service() -> Iterator[ConsoleService]:
    with console_service(StubDelays(token_s=0.005)) as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a URL in a context of its own, with these options. Fails if the page logged an error."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_at(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        # The browser itself logs every answer that is an error; those are the tests' own.
        page.on("console", lambda said: said.type == "error" and problems.append(said.text))
        page.goto(url)
        page.wait_for_function(READY)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert [problem for problem in problems if "Failed to load resource" not in problem] == []

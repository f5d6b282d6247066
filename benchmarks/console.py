"""Measures the console in a real browser: time to first paint, size, accessibility and memory growth.

Usage: python benchmarks/console.py [--quick] [--save]

The gateway runs in this process over a stub for an engine, and the browser is Chromium through Playwright.
First paint is taken in a new context each time, so with cold caches, over loopback. Violations are axe-core's
over all views after a comparison, in light and dark, at a phone's and a desktop's width. Growth is that of
the JavaScript heap, after garbage collections, over 1,000 updates of the live view. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.figures import Figure, report, spread
from kintsugi.gateway.console.routes import FILES, FILES_BYTES_MAX
from tests.fakes.console_service import ConsoleService, console_service

AXE = Path(__file__).parent.parent / ".tools" / "axe.min.js"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FIRST_PAINT_MS_MAX = 500.0
GROWTH_MIB_MAX = 5.0
UPDATES = 1000
WARM_UP_UPDATES = 20
PAINTS = 9
VIEWS = ("compare", "live", "log")

_UPDATE = """async (count) => {
  const { Live } = await import("/console/live.js");
  const { get } = await import("/console/api.js");
  window.measured ??= new Live(document.getElementById("live"), () => {});
  const sample = await get("live");
  const tier = (name) => (
    { name, chunks: 1, bytes_used: 1, bytes_capacity: 9, evictions: 0, queue_bytes: 0, failure: "" });
  sample.store.shards = [1, 2, 3].map((number) => ({
    address: `shard-${number}:7400`, answers: true, draining: false,
    chunks: 1, hits: 1, misses: 1, quarantined: 0,
    tiers: [tier("ram"), tier("ssd0")],
  }));
  for (let number = 0; number < count; number += 1) {
    sample.at_unix_s += 2;
    sample.gateway.tokens_hit += number;
    sample.store.chunks += 1;
    sample.store.shards[number % 3].hits += 1;
    window.measured.show(sample);
    if (number % 50 === 0) await new Promise(requestAnimationFrame);
  }
}"""


def first_paint_ms(browser: Any, url: str) -> float:
    """From the start of navigation to the first pixels, with nothing cached."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#question")
    script = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    page.wait_for_function(f"({script})() !== undefined")
    painted = float(page.evaluate(script))
    context.close()
    return painted


def violations(browser: Any, url: str) -> list[str]:
    """Violations that axe-core finds, by view, colour scheme and width."""
    found = []
    for scheme in ("light", "dark"):
        for width in (375, 1200):
            options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
            context = browser.new_context(bypass_csp=True, **options)
            page = context.new_page()
            page.goto(url)
            page.click("button:has-text('Ask both ways')")
            page.wait_for_function("() => document.getElementById('progress').textContent.startsWith('Done')")
            page.evaluate(AXE.read_text(encoding="utf-8"))
            for view in VIEWS:
                page.click(f"#tab-{view}")
                page.wait_for_selector(f"#{view} >> visible=true")
                found += [
                    f"{one['id']} in {view}, {scheme}, {width} px"
                    for one in page.evaluate("() => axe.run()")["violations"]
                ]
            context.close()
    return found


def growth_mib(browser: Any, url: str, updates: int) -> float:
    """Growth of the page's heap while the live view is updated."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#question")
    page.evaluate("() => document.getElementById('tab-log').click()")
    session = context.new_cdp_session(page)

    def heap_bytes() -> int:
        for _ in range(3):
            session.send("HeapProfiler.collectGarbage")
        return int(session.send("Runtime.getHeapUsage")["usedSize"])

    page.evaluate(_UPDATE, WARM_UP_UPDATES)
    before = heap_bytes()
    page.evaluate(_UPDATE, updates)
    grown = heap_bytes() - before
    context.close()
    return grown / 2**20


def measure(browser: Any, service: ConsoleService, quick: bool) -> list[Figure]:
    first_paint_ms(browser, service.url)  # the first page also starts a process of the browser
    paints = [first_paint_ms(browser, service.url) for _ in range(3 if quick else PAINTS)]
    found = violations(browser, service.url)
    files = list(FILES.iterdir())
    return [
        Figure.at_most(
            "console_first_paint_ms",
            statistics.median(paints),
            FIRST_PAINT_MS_MAX,
            "ms",
            f"loopback, cold, {spread(paints, 'ms')} of {len(paints)}",
        ),
        Figure.at_most(
            "console_kib",
            sum(file.stat().st_size for file in files) / 1024,
            FILES_BYTES_MAX / 1024,
            "KiB",
            f"{len(files)} files, not compressed",
        ),
        Figure.at_most("console_axe_violations", len(found), 0, "", "; ".join(found) or "none"),
        Figure.at_most(
            "console_idle_growth_mib",
            growth_mib(browser, service.url, UPDATES),
            GROWTH_MIB_MAX,
            "MiB",
            f"{UPDATES} updates",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer paints; figures are noise")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    options = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("Playwright is not installed: pip install playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit("no Chromium is installed: apt-get install chromium, or name one in $CHROMIUM")
    if not AXE.is_file():
        sys.exit(f"{AXE} is missing: make tools")
    with console_service() as service, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        figures = measure(browser, service, options.quick)
        version = browser.version
        browser.close()
    configuration = {"browser": f"Chromium {version}", "quick": options.quick, "updates": UPDATES}
    report("console", configuration, figures, save_as="console" if options.save else None)


if __name__ == "__main__":
    main()

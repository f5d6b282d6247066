"""Generate the pages of the reference that need the code: `python -m scripts.reference [--into FOLDER]`.

Writes Markdown that `scripts/site_hooks.py` adds to the documentation site: settings, metrics, and the
committed results of benchmarks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.reference import metric_families, settings
from scripts.reference.page import Page

from benchmarks.support import results_page

FOLDER = Path("build/docs")


def pages() -> list[Page]:
    return [settings.page(), metric_families.page()]


def write(folder: Path) -> None:
    texts = {page.path: page.markdown() for page in pages()} | {results_page.PATH: results_page.markdown()}
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=FOLDER, help="folder for the pages")
    write(parser.parse_args().into)


if __name__ == "__main__":
    main()

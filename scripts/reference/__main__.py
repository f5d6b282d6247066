"""Generate the reference from the code: `python -m scripts.reference [--undocumented] [--into FOLDER]`.

Writes Markdown that `scripts/site_hooks.py` adds to the documentation site. ``--undocumented`` writes
nothing: it prints a JSON array of the public names without a sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.reference import (
    command_line,
    manifests,
    metric_families,
    protocol,
    python_names,
    results,
    settings,
)
from scripts.reference.page import Page

FOLDER = Path("build/docs")


def pages() -> list[Page]:
    return [
        command_line.page(),
        settings.page(),
        metric_families.page(),
        protocol.page(),
        manifests.crd_page(),
        manifests.values_page(),
    ]


def undocumented() -> list[str]:
    """Public names without a sentence: of the SDK, and of every page whose entries must have one."""
    return [*python_names.undocumented(), *(name for page in pages() for name in page.undocumented())]


def write(folder: Path) -> None:
    texts = {page.path: page.markdown() for page in pages()} | {results.PATH: results.markdown()}
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--undocumented", action="store_true", help="print public names without a sentence")
    parser.add_argument("--into", type=Path, default=FOLDER, help="folder for the pages")
    given = parser.parse_args(arguments)
    if given.undocumented:
        print(json.dumps(undocumented(), indent=1))
    else:
        write(given.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())

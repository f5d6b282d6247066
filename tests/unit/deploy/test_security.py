"""SECURITY.md names code and tests that exist, and README links it."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
TEXT = (REPOSITORY / "SECURITY.md").read_text()
FOLDERS = (REPOSITORY, REPOSITORY / "services/kintsugi", REPOSITORY / "tests")


def anchor_of(heading: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`([\w./-]+\.py)`", TEXT)
    assert len(named) > 20
    assert [name for name in named if not any((folder / name).is_file() for folder in FOLDERS)] == []


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", TEXT)
    assert links
    for path, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (REPOSITORY / path).read_text(), re.M)
        assert not anchor or anchor in map(anchor_of, headings), f"{path}#{anchor}"


def test_it_is_found_and_short() -> None:
    assert "(SECURITY.md)" in (REPOSITORY / "README.md").read_text()
    assert "(../SECURITY.md)" in (REPOSITORY / "docs/ARCHITECTURE.md").read_text()
    assert len(TEXT.split()) <= 1_200

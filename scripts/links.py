"""Find links that lead nowhere: `python scripts/links.py [--site FOLDER] [--json]`.

Checks the links between the repository's Markdown files, and with ``--site`` those of the built documentation
site: that the file is there, and what the fragment names in it. Links to other hosts are not followed; a page
of the site that loads anything from one is an error, too. ``--json`` prints an array of the broken links.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = Path(__file__).parents[1]
GENERATED = frozenset(
    f"docs/{name}.md"
    for name in (
        *("benchmarks", "reference/cli", "reference/configuration", "reference/crds", "reference/metrics"),
        *("reference/protocol", "reference/values"),
    )
)
"""Pages that `scripts.reference` makes: they are on the site alone, where their headings are checked."""
LOADING = {"img": "src", "link": "href", "script": "src", "source": "src", "iframe": "src"}
"""Elements that a browser loads something for, and the attribute that says what."""
LOADED_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "manifest"}

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"`[^`\n]*`|\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#* *$", re.MULTILINE)
_LINK_TEXT = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class BrokenLink:
    """A link that leads nowhere."""

    page: str
    target: str
    why: str

    def __str__(self) -> str:
        return f"{self.page}: {self.target}: {self.why}"


@dataclass
class _Html(HTMLParser):
    """What one page has: anchors, links, and what it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {name for name in (given.get("id"), given.get("name")) if name}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        target = given.get(LOADING.get(tag, "")) or ""
        if target and (tag != "link" or LOADED_RELATIONS & set((given.get("rel") or "").split())):
            self.loaded.append(target)


def broken_in_repository(root: Path = REPOSITORY) -> Iterator[BrokenLink]:
    """Yield broken links between committed Markdown files."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            yield from broken_in_markdown(root, name)


def broken_in_markdown(root: Path, name: str) -> Iterator[BrokenLink]:
    """Yield broken links of one file."""
    prose = _FENCE.sub("", (root / name).read_text(encoding="utf-8"))
    links = [link["target"] for link in _LINK.finditer(prose) if link["target"]]
    targets = [link for link in links if normpath(Path(name).parent / urlsplit(link).path) not in GENERATED]
    yield from _broken(name, targets, lambda path: root / Path(name).parent / path, root / name, headings_of)


def broken_in_site(site: Path) -> Iterator[BrokenLink]:
    """Yield broken links of a built site, and what its pages load from elsewhere."""
    for page in sorted(site.rglob("*.html")):
        name, html = str(page.relative_to(site)), _read_html(page)
        for target in html.loaded:
            if urlsplit(target).netloc:
                yield BrokenLink(name, target, "is loaded from another host")
        targets = [*html.links, *html.loaded]
        # A page for addresses that do not exist is served anywhere, so its links begin at the root.
        yield from _broken(name, targets, _place_in(site, page), page, lambda path: _read_html(path).anchors)


def _place_in(site: Path, page: Path) -> Callable[[str], Path]:
    def place(path: str) -> Path:
        found = site / path.lstrip("/") if path.startswith("/") else page.parent / path
        return found / "index.html" if found.is_dir() else found

    return place


def _broken(
    name: str,
    targets: Iterable[str],
    place: Callable[[str], Path],
    page: Path,
    anchors_of: Callable[[Path], Iterable[str]],
) -> Iterator[BrokenLink]:
    for target in dict.fromkeys(targets):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        found = place(unquote(parts.path)) if parts.path else page
        if not found.exists():
            yield BrokenLink(name, target, "no such file")
        elif (
            parts.fragment
            and found.suffix in (".md", ".html")
            and unquote(parts.fragment) not in set(anchors_of(found))
        ):
            yield BrokenLink(name, target, "no such heading")


@cache
def headings_of(path: Path) -> frozenset[str]:
    """Anchors of a Markdown file's headings, as code hosts and the site make them."""
    prose = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found: dict[str, int] = {}
    for heading in _HEADING.findall(prose):
        text = _LINK_TEXT.sub(r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return frozenset(slug for name, last in found.items() for slug in (name, *_numbered(name, last)))


def _numbered(name: str, last: int) -> Iterator[str]:
    yield from (f"{name}-{number}" for number in range(1, last + 1))


@cache
def _read_html(path: Path) -> _Html:
    html = _Html()
    html.feed(path.read_text(encoding="utf-8"))
    return html


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, help="folder of the built site")
    parser.add_argument("--json", action="store_true", help="print a JSON array, and exit with 0")
    given = parser.parse_args(arguments)
    broken = [*broken_in_repository(), *(broken_in_site(given.site) if given.site else ())]
    if given.json:
        print(json.dumps([str(one) for one in broken], indent=1))
        return 0
    for one in broken:
        print(one)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

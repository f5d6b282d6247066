"""Hooks of mkdocs. They add to the site what is not in `docs/`: generated pages, Markdown files of the
repository's root, and files that pages link to. They also embed drawings in pages.

Pages can also be read in the repository, so their links are relative to their file and may leave `docs/`. On
the site a Markdown file of the repository's root is the page `project/NAME`, and any other file is published
below `files/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
GENERATED = REPOSITORY / "build/docs"
DECISIONS = "adr/README.md"
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md")

_FENCE = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"`[^`\n]*`|(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
"""Also matches inline code, which holds no links; `target` is None then."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions in the navigation, so that a new one needs no other edit."""
    paths = sorted(path.name for path in (Path(config.docs_dir) / "adr").glob("[0-9]*.md"))
    listed = [DECISIONS, *(f"adr/{name}" for name in paths)]
    for section in config.nav or []:
        for entry in next(iter(section.values())) if isinstance(section, dict) else []:
            if isinstance(entry, dict) and DECISIONS in entry.values():
                entry["Decisions"] = listed
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files outside `docs/`."""
    if not GENERATED.is_dir():
        raise PluginError("the generated pages are missing: run `make docs`, or python -m scripts.reference")
    for path in sorted(GENERATED.rglob("*.md")):
        files.append(File.generated(config, str(path.relative_to(GENERATED)), abs_src_path=str(path)))
    for name in PROJECT:
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(REPOSITORY / name)))
    for file in list(files.documentation_pages()):
        for target in sorted(_files_linked_from(file)):
            if files.get_file_from_path(f"files/{target}") is None:
                added = File.generated(config, f"files/{target}", abs_src_path=str(REPOSITORY / target))
                added.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the repository's links for the site, and embed drawings instead of linking to them."""
    here = page.file.src_uri

    def rewrite(link: re.Match[str]) -> str:
        target = _target(here, link["target"])
        if target is None:
            return link[0]
        mark, fragment = link["mark"], urlsplit(link["target"]).fragment
        if mark and target.endswith(".svg"):
            return _drawing(REPOSITORY / target, link["text"])
        there = posixpath.relpath(_place(target), posixpath.dirname(here) or ".")
        return f"{mark}[{link['text']}]({there}{f'#{fragment}' if fragment else ''})"

    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(rewrite, part) for index, part in enumerate(parts))


def _files_linked_from(file: File) -> set[str]:
    text = Path(file.abs_src_path or "").read_text(encoding="utf-8")
    prose = "".join(part for index, part in enumerate(_FENCE.split(text)) if not index % 2)
    targets = (_target(file.src_uri, link["target"]) for link in _LINK.finditer(prose))
    return {
        target
        for target in targets
        if target
        and not target.startswith("docs/")
        and target not in PROJECT
        and (REPOSITORY / target).is_file()
    }


def _target(here: str, link: str | None) -> str | None:
    """The path in the repository that a link on the page `here` leads to; None for a link to elsewhere."""
    parts = urlsplit(link or "")
    if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_origin(here)), parts.path))
    if (REPOSITORY / path).is_dir():
        return f"{path}/README.md"
    return path


def _origin(here: str) -> str:
    """Return the path of a page in the repository. A generated page counts as if it were in `docs/`."""
    top, _, rest = here.partition("/")
    return rest if top in ("project", "files") else f"docs/{here}"


def _place(target: str) -> str:
    """Return the path on the site of a file of the repository."""
    if target in PROJECT:
        return f"project/{target}"
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"


def _drawing(path: Path, text: str) -> str:
    """Return the SVG of a drawing for embedding, so that it uses the colours of the page."""
    if not path.is_file():
        raise PluginError(f"there is no drawing {path.relative_to(REPOSITORY)}")
    return (
        f'<figure class="drawing" aria-label="{text}">\n{path.read_text(encoding="utf-8").strip()}\n</figure>'
    )

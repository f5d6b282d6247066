"""Links that lead nowhere are found, in Markdown and in a built site, and others are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import links


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_md", ".md").replace("_html", ".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("there.md", ""),
        ("there.md#what-is-it", ""),
        ("there.md#what-is-it-1", ""),
        ("there.md#a-link-and-code", ""),
        ("#here", ""),
        ("folder/", ""),
        ("https://example.org/x", ""),
        ("mailto:a@example.org", ""),
        ("docs/reference/cli.md#kintsugi-serve", ""),
        ("absent.md", "no such file"),
        ("there.md#what-is-that", "no such heading"),
        ("there.md#what-is-it-2", "no such heading"),
        ("there.md#not-a-heading", "no such heading"),
        ("#nowhere", "no such heading"),
    ],
)
def test_links_of_a_markdown_file(tmp_path: Path, link: str, why: str) -> None:
    there = "# What is it?\n## What is it?\n## A [link](x.md) and `code`\n```\n# not a heading\n```\n"
    write(tmp_path, page_md=f"# Here\n[text]({link})\n", there_md=there, folder__x_md="")
    found = list(links.broken_in_markdown(tmp_path, "page.md"))
    assert found == ([links.BrokenLink("page.md", link, why)] if why else [])


def test_code_holds_no_links(tmp_path: Path) -> None:
    write(tmp_path, page_md="`[a](b.md)`\n```\n[a](b.md)\n```\n[`code`](c.md)\n")
    assert [one.target for one in links.broken_in_markdown(tmp_path, "page.md")] == ["c.md"]


@pytest.mark.parametrize(
    ("html", "broken"),
    [
        ('<a href="sub/#x">', []),
        ('<a href="sub/index.html"><a href="/sub/"><a href=".">', []),
        ('<a href="https://example.org"><link rel="canonical" href="https://example.org">', []),
        ('<a href="sub/#y">', ["sub/#y"]),
        ('<a href="gone/">', ["gone/"]),
        ('<img src="gone.png">', ["gone.png"]),
        ('<script src="https://example.org/x.js"></script>', ["https://example.org/x.js"]),
        ('<link rel="stylesheet" href="//example.org/x.css">', ["//example.org/x.css"]),
    ],
)
def test_links_of_a_site(tmp_path: Path, html: str, broken: list[str]) -> None:
    write(tmp_path, index_html=html, sub__index_html='<h2 id="x">')
    assert [one.target for one in links.broken_in_site(tmp_path)] == broken


def test_the_repository_has_none() -> None:
    assert list(links.broken_in_repository()) == []

"""Renders one blend as a self-contained page: which tokens each layer computed, and a timeline.

The drawing is the console's: its module and style sheet stand in the page, which refers to no other file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kintsugi.gateway.console.assets import read_text

_START = """
renderBlend(document.getElementById("blend"), JSON.parse(document.getElementById("view").textContent));
"""


@dataclass(frozen=True)
class Page:
    """The page's content as plain text; the template escapes it."""

    title: str
    subtitle: str
    question: str
    answer: str
    facts: list[tuple[str, str]]
    view: Mapping[str, Any]
    """What `gateway.console.view.view_of` makes of the blend."""
    comparison_headings: Sequence[str] = ()
    comparison: Sequence[Sequence[str]] = field(default=())


def render_page(page: Page) -> str:
    """The page as HTML. All text is escaped, and the browser may run and show only what the page holds."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    folder = files(__package__) / "templates"
    style = read_text("blend.css") + (folder / "report.css").read_text(encoding="utf-8")
    script = read_text("blend.js") + _START
    policy = (
        f"default-src 'none'; style-src {_hash_of(style)}; script-src {_hash_of(script)}; base-uri 'none'"
    )
    return environment.from_string((folder / "report.html").read_text(encoding="utf-8")).render(
        page=page,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        # In a script element only `<` could end it.
        view=Markup(json.dumps(page.view).replace("<", "\\u003c")),
    )


def _hash_of(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""The console's files, which are read once, and the HTTP headers that restrict their use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

CONSOLE_PATH = "/console"
PAGE = "index.html"
MEDIA_TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
BYTES_MAX = 400 << 10
"""Maximum size of all files together, so that the console opens quickly over any connection."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Headers of every file. They forbid other origins, inline scripts and styles, and text that becomes markup.
Browsers revalidate each file; the answer is 304 if it has not changed."""


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    name: str
    content: bytes
    etag: str

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES[self.name.rpartition(".")[2]]


@lru_cache(maxsize=1)
def read_assets() -> Mapping[str, Asset]:
    """Return all files by name."""
    folder = files(__package__) / "static"
    found = (entry for entry in folder.iterdir() if entry.name.rpartition(".")[2] in MEDIA_TYPES)
    contents = {entry.name: entry.read_bytes() for entry in found}
    return {
        name: Asset(name, text, f'"{hashlib.sha256(text).hexdigest()[:32]}"')
        for name, text in contents.items()
    }

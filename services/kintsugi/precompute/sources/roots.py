"""Which sources a job may read: an allow-list of schemes and roots.

A root is a folder (`/data/corpora`), a URL (`s3://bucket/docs`, `https://docs.example.com`), or a scheme
alone (`gs://`). `*` stands for everything. Links and redirects are followed only to what is allowed, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from kintsugi.core.errors import InvalidField, PermissionDenied

ANY = "*"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
_WEB = ("http", "https")


@dataclass(frozen=True)
class SourceRoots:
    """An allow-list of sources."""

    roots: tuple[str, ...]

    def __post_init__(self) -> None:
        for root in self.roots:
            if root != ANY and not _SCHEME.fullmatch(root) and not os.path.isabs(root):
                raise InvalidField(
                    "allow-source", f"{root!r} must be an absolute path, a URL, a scheme as s3://, or {ANY}"
                )

    @property
    def is_everywhere(self) -> bool:
        return ANY in self.roots

    def allows(self, url: str) -> bool:
        """Whether a URL or local path lies within a root. Local links are resolved first."""
        try:
            return self.is_everywhere or any(_is_within(url, root) for root in self.roots)
        except ValueError:  # a path with zero bytes or surrogates
            return False

    def check(self, source: str) -> None:
        """Raises `PermissionDenied` for a source outside the roots."""
        if not self.allows(source):
            raise PermissionDenied(
                f"source {source!r} is not among the sources that this server reads "
                f"({', '.join(self.roots) or 'none'}); start it with --allow-source, or choose one of them"
            )

    def check_opened(self, stream: Any, url: str) -> None:
        """Checks a local file by its open descriptor, because the path may have become a link since it was
        listed. Raises `PermissionError`."""
        if self.is_everywhere or _local_path(url) is None:
            return
        opened = os.readlink(f"/proc/self/fd/{stream.fileno()}")
        if not self.allows(opened):
            raise PermissionError(f"{url} leads outside the sources that may be read")

    def open_options(self, url: str) -> dict[str, Any]:
        """Options with which fsspec opens the URL, so that redirects stay within the roots."""
        if self.is_everywhere or urlsplit(url).scheme.lower() not in _WEB:
            return {}
        return {"client_kwargs": {"trace_configs": [self._refuse_redirects()]}}

    def _refuse_redirects(self) -> Any:
        import aiohttp

        async def check_redirect(session: Any, trace: Any, params: Any) -> None:
            target = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
            joined = str(params.response.url.join(type(params.response.url)(target)))
            if not self.allows(joined):
                raise PermissionError(f"{params.url} redirects to {joined}, which may not be read")

        config = aiohttp.TraceConfig()
        config.on_request_redirect.append(check_redirect)
        return config


EVERYWHERE = SourceRoots((ANY,))
"""For jobs of the user who runs the process."""
NOWHERE = SourceRoots(())


def _local_path(url: str) -> str | None:
    """The path of a local source; None for one of another scheme."""
    match = _SCHEME.fullmatch(url)
    if match is not None:
        return match[2] if match[1].lower() in _LOCAL else None
    if "://" in url:
        return None  # fsspec takes what stands before it for a scheme, whatever it is
    # fsspec also reads `file:/path`.
    scheme, colon, rest = url.partition(":")
    return rest if colon and scheme in _LOCAL else url


def _is_within(url: str, root: str) -> bool:
    if root == ANY:
        return True
    path, folder = _local_path(url), _local_path(root)
    if path is None or folder is None:
        return path is folder and _is_within_url(url, root)
    resolved, base = os.path.realpath(os.path.expanduser(path)), os.path.realpath(folder)
    return os.path.commonpath((resolved, base)) == base


def _is_within_url(url: str, root: str) -> bool:
    host, parts = _split_url(url)
    root_host, root_parts = _split_url(root)
    if ".." in parts or url.partition("://")[0].lower() != root.partition("://")[0].lower():
        return False
    if not root_host and not root_parts:
        return True
    return host == root_host and parts[: len(root_parts)] == root_parts


def _split_url(url: str) -> tuple[str, Sequence[str]]:
    """The authority and the segments of the path, unquoted."""
    rest = url.partition("://")[2].partition("#")[0].partition("?")[0].replace("\\", "/")
    host, _, path = rest.partition("/")
    # What is quoted twice might be unquoted twice.
    return host.lower(), [part for part in unquote(unquote(path)).split("/") if part not in ("", ".")]

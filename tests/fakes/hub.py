"""A hub of models on loopback: as much of its HTTP as `huggingface_hub` uses to list and fetch files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """One commit of each model, by name, with its files."""

    models: dict[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    fetched: list[str] = field(default_factory=list)
    """Files that somebody read, as `org/model/file`."""
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), *parts[4:6])
        else:
            self._file("/".join(parts[:2]), "/".join(parts[4:]))

    def _describe(self, name: str, what: str = "revision", revision: str = "main") -> None:
        if self._is_refused(name):
            return
        if revision not in ("main", COMMIT):
            self._send(b"", "text/plain", 404, {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.hub.models[name]
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
            for path, data in files.items()
        ]
        about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
        self._send(json.dumps(entries if what == "tree" else about).encode(), "application/json")

    def _file(self, name: str, path: str) -> None:
        if self._is_refused(name):
            return
        data = self.hub.models[name].get(path)
        if data is None:
            self._send(b"", "text/plain", 404, {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.hub.fetched.append(f"{name}/{path}")
        self._send(data, "application/octet-stream", 200, {"ETag": f'"{_oid(data)}"'})

    def _is_refused(self, name: str) -> bool:
        if name in self.hub.gated:
            self._send(b"", "text/plain", 403, {"X-Error-Code": "GatedRepo"})
        elif name not in self.hub.models:
            self._send(b"", "text/plain", 404, {"X-Error-Code": "RepoNotFound"})
        else:
            return False
        return True

    def _send(
        self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for header, value in {"X-Repo-Commit": COMMIT, "Content-Type": kind, **(headers or {})}.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def point_library(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """`huggingface_hub` reads its environment when it is imported, and we read it when we need it."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve it, and say where."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

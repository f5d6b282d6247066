"""What an allow-list of sources admits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")

from kintsugi.core.errors import InvalidField, PermissionDenied
from kintsugi.precompute.sources.files import FileRange, Format, list_source
from kintsugi.precompute.sources.readers import Columns, Document, Failure, read
from kintsugi.precompute.sources.roots import EVERYWHERE, NOWHERE, SourceRoots


@pytest.mark.parametrize(
    ("root", "inside", "outside"),
    [
        ("/data/docs", "/data/docs/a.txt", "/data/docs2/a.txt"),
        ("/data/docs", "file:///data/docs", "file:///data/docs/../secret"),
        ("file:///data/docs", "/data/docs/deep/../a", "file:/etc/passwd"),
        ("/data/docs", "local:///data/docs/a", "memory:///data/docs/a"),
        ("s3://bucket/docs", "s3://bucket/docs/a", "s3://bucket/docs/../secret"),
        ("s3://bucket", "s3://bucket/a", "s3://bucket2/a"),
        ("/data/docs", "/data/docs/", "/data/docs/\0"),
        ("/data/docs", "/data/docs/a:b", "/data/docs/a://b"),
        ("s3://", "s3://any/a", "gs://any/a"),
        ("https://docs.example", "https://docs.example/a", "https://docs.example@evil/a"),
        ("https://docs.example", "HTTPS://Docs.Example/a", "https://docs.example.evil/a"),
        ("https://docs.example/a/", "https://docs.example/a?b=c", "https://docs.example/a/%2e%2e/b"),
        ("https://docs.example/a", "https://docs.example/a/b", "https://docs.example/a/%252e%252e/b"),
        ("https://docs.example/a", "https://docs.example/a#b", "https://docs.example\\@evil/a"),
        ("https://docs.example/a", "https://docs.example//a", "http://docs.example/a"),
        ("https://docs.example", "https://docs.example", "https:docs.example"),
        ("https://docs.example", "https://docs.example/", "docs.example"),
    ],
)
def test_a_root_holds_what_lies_below_it(root: str, inside: str, outside: str) -> None:
    roots = SourceRoots((root,))
    assert roots.allows(inside)
    assert not roots.allows(outside)
    assert EVERYWHERE.allows(outside)
    assert not NOWHERE.allows(inside)


def test_a_root_is_no_relative_path() -> None:
    with pytest.raises(InvalidField, match="absolute"):
        SourceRoots(("docs",))


def test_links_lead_nowhere_else(tmp_path: Path) -> None:
    docs, secret = tmp_path / "docs", tmp_path / "secret.txt"
    docs.mkdir()
    secret.write_text("secret")
    (docs / "a.txt").write_text("plain")
    (docs / "link.txt").symlink_to(secret)
    (docs / "near.txt").symlink_to(docs / "a.txt")
    roots = SourceRoots((str(docs),))
    listing = list_source(str(docs), roots=roots)
    assert [piece.name for piece in listing.pieces] == ["a.txt", "near.txt"]
    assert listing.unlisted == {f"file://{docs}/link.txt": "lies outside the sources that may be read"}
    with pytest.raises(PermissionDenied, match="--allow-source"):
        list_source(str(tmp_path), roots=roots)
    # A file that became a link after it was listed.
    piece = FileRange(f"file://{docs}/link.txt", "link.txt", Format.TEXT, "")
    (failure,) = read(piece, Columns(), roots)
    assert isinstance(failure, Failure)
    assert "leads outside" in failure.reason
    assert isinstance(next(read(listing.pieces[1], Columns(), roots)), Document)


class Redirecting(BaseHTTPRequestHandler):
    """`/docs/near.jsonl` redirects within the root, `/docs/far.jsonl` out of it."""

    def do_GET(self) -> None:
        targets = {"/docs/near.jsonl": "/docs/here.jsonl", "/docs/far.jsonl": "/secret.jsonl"}
        if self.path in targets:
            self.send_response(302)
            self.send_header("Location", targets[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = json.dumps({"text": self.path}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  # the base class calls it so

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec keeps its HTTP session for good
def test_redirects_stay_within_the_roots(web: str) -> None:
    pytest.importorskip("aiohttp")
    roots = SourceRoots((f"{web}/docs",))
    found = {}
    for name in ("near", "far"):
        piece = FileRange(f"{web}/docs/{name}.jsonl", f"{name}.jsonl", Format.JSONL, "")
        (found[name],) = read(piece, Columns(), roots)
        assert isinstance(next(read(piece, Columns())), Document)
    assert isinstance(found["near"], Document)
    assert found["near"].text == "/docs/here.jsonl"
    assert isinstance(found["far"], Failure)
    assert "secret" not in found["far"].document_id

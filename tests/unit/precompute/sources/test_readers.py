"""Sources into documents, and what is wrong with them into reasons."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.errors import InvalidField, NotFound, ResourceExhausted, Unavailable
from kintsugi.precompute.sources import files, readers
from kintsugi.precompute.sources.files import FileRange, Format, list_source
from kintsugi.precompute.sources.readers import Columns, Document, Failure, read


def read_all(source: Path | str, columns: Columns | None = None) -> list[Document | Failure]:
    return [item for piece in list_source(str(source)).pieces for item in read(piece, columns or Columns())]


def documents(source: Path | str) -> dict[str, str]:
    found = read_all(source)
    assert all(isinstance(item, Document) for item in found), found
    return {item.document_id: item.text for item in found if isinstance(item, Document)}


def failures(source: Path | str) -> list[str]:
    return [item.reason for item in read_all(source) if isinstance(item, Failure)]


ROWS = [{"id": f"d{n}", "text": f"text {n} é", "version": str(n), "topic": "tea"} for n in range(5)]


def test_json_lines_csv_and_parquet_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = ["id,text,version,topic", *(",".join(row.values()) for row in ROWS)]
    (tmp_path / "a.csv").write_text("\ufeff" + "\n".join(lines))
    read_by = {suffix: read_all(tmp_path / f"a.{suffix}") for suffix in ("jsonl", "csv", "parquet")}
    for found in read_by.values():
        assert [
            (item.document_id, item.text, item.version) for item in found if isinstance(item, Document)
        ] == [(row["id"], row["text"], row["version"]) for row in ROWS]


def test_folders_of_text_markdown_and_html(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "deep/b.md").write_text("# Title\n\nmarked")
    (tmp_path / "c.html").write_bytes(
        '<meta charset="latin-1"><script>no()</script><h1>Tea</h1><p>h\u00e9 there'.encode("latin-1")
    )
    found = documents(tmp_path)
    assert found == {"a.txt": "plain", "deep/b.md": "# Title\n\nmarked", "c.html": "Tea\n\nh\u00e9 there\n"}
    marked = [item for item in read_all(tmp_path) if isinstance(item, Document) and item.markdown]
    assert [item.document_id for item in marked] == ["deep/b.md"]


def test_text_of_any_name_is_read(tmp_path: Path) -> None:
    """Content decides, not the suffix."""
    (tmp_path / "src").mkdir()
    texts = {
        "README": "Read me.\n",
        "LICENSE": "MIT\n",
        "a.py": "x = 1\n",
        "b.json": "{}\n",
        "c.yaml": "a: 1\n",
    }
    texts |= {"d.rst": "Title\n=====\n", "e.cfg": "\ttab\r\n", "src/\u6f22": "\u6f22\u5b57\n"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    for name, charset in (("f.log", "utf-16"), ("g.txt", "utf-16-be")):
        mark = b"" if charset == "utf-16" else codecs.BOM_UTF16_BE
        (tmp_path / name).write_bytes(mark + "two bytes each\n".encode(charset))
        texts[name] = "two bytes each\n"
    assert documents(tmp_path) == texts


def test_what_is_not_text_is_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0" + bytes(100_000))
    (tmp_path / "late.bin").write_bytes(b"x" * readers.HEAD_BYTES + b"\0")
    (tmp_path / "latin").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "__init__.py").write_bytes(b"")
    (tmp_path / ".env").write_text("SECRET=1")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("[core]")
    found = read_all(tmp_path)
    assert [item.document_id for item in found if isinstance(item, Document)] == ["a.txt"]
    left_out = {item.document_id: item for item in found if isinstance(item, Failure)}
    assert all(item.left_out for item in left_out.values())
    assert {name: item.reason.split(";")[0] for name, item in left_out.items()} == {
        "image.png": "is not text",
        "late.bin": "is not text: it has a zero character",
        "latin": "is neither UTF-8 text nor UTF-16 text with a byte order mark",
        "__init__.py": "has no text",
    }
    at = f"file://{tmp_path}"
    reason = "is hidden: its name begins with a dot"
    assert list_source(str(tmp_path)).left_out == {f"{at}/.env": reason, f"{at}/.git/": reason}


def test_gzipped_files_are_read_as_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"plain"))
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"# Title"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() + b"\n"))
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b"id,text\nc,column\n"))
    (tmp_path / "notes.gz").write_bytes(gzip.compress(b"no suffix"))
    assert documents(tmp_path) == {
        "a.txt.gz": "plain",
        "b.md.gz": "# Title",
        "d0": "text 0 \u00e9",
        "c": "column",
        "notes.gz": "no suffix",
    }
    (tmp_path / "c.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"cut off" * 99)[:-9])
    assert len(failures(tmp_path)) == 2


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "DOCUMENT_BYTES_MAX", 10_000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b" " * 10_000_000))
    assert failures(tmp_path) == ["exceeds 10000 bytes; split it"]


def test_a_stream_may_return_less_than_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:7])

        def read(self, size: int | None = -1) -> bytes:
            return super().read(7)

    text = "seven bytes at a time, " * 1_000
    (tmp_path / "a.txt").write_text(text)
    (piece,) = list_source(str(tmp_path)).pieces
    monkeypatch.setattr(fsspec, "open", lambda *_, **__: Slow(text.encode()))
    (item,) = read(piece, Columns())
    assert isinstance(item, Document)
    assert item.text == text


def test_any_file_system_of_fsspec(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/corpus/a.jsonl", json.dumps(ROWS[0]).encode())
    try:
        assert documents("memory://corpus") == {"d0": "text 0 é"}
    finally:
        memory.rm("/corpus", recursive=True)


@pytest.mark.parametrize("piece_bytes", [1, 7, 40, 64, 1000])
def test_a_cut_file_gives_every_line_once(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", piece_bytes)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = read_all(tmp_path)
    assert [item.document_id for item in found] == [row["id"] for row in ROWS]


def test_one_bad_line_costs_itself(tmp_path: Path) -> None:
    good = json.dumps(ROWS[0]).encode()
    bad = [
        b"{",
        b"[1]",
        b'{"id": "x"}',
        b'{"text": 3}',
        b'{"text": " "}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, *bad, json.dumps(ROWS[1]).encode()]))
    found = read_all(tmp_path)
    assert [item.document_id for item in found if isinstance(item, Document)] == ["d0", "d1"]
    reasons = [item.reason for item in found if isinstance(item, Failure)]
    for reason, words in zip(
        reasons,
        ("not JSON", "not an object", "there are 'id'", "not text", "no text", "UTF-8", "UTF-8"),
        strict=True,
    ):
        assert words in reason


def test_a_missing_column_names_those_there_are(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"body": "x", "n": 1}]), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("body,n\nx,1\n")
    for reason in failures(tmp_path):
        assert reason == "no column 'text'; there are 'body', 'n': choose one (--columns text=NAME)"
    assert len(failures(tmp_path)) == 2


def test_a_csv_without_the_column_is_one_failure(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("body,n\n" + "x,1\n" * 50)
    assert failures(tmp_path) == ["no column 'text'; there are 'body', 'n': choose one (--columns text=NAME)"]


@pytest.fixture(autouse=True)
def restore_field_limit() -> Iterator[None]:
    """Reading CSV sets a limit of the whole process: restore it for other tests."""
    limit = csv.field_size_limit()
    yield
    csv.field_size_limit(limit)


def test_wrong_encodings_broken_files_and_enormous_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "DOCUMENT_BYTES_MAX", 100)
    (tmp_path / "a.txt").write_bytes(b"\xff\xff")
    (tmp_path / "b.parquet").write_bytes(b"not parquet")
    (tmp_path / "c.txt").write_text("x" * 101)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "y" * 300}) + "\n" + json.dumps({"text": "z"}))
    (tmp_path / "e.csv").write_bytes(b"text,id\ngood,a\n\xff,b\nc,\xff\n")
    (tmp_path / "f.md").write_text("")
    reasons = failures(tmp_path)
    for words, reason in zip(
        ("UTF-8", "cannot be read", "exceeds 100", "a line of", "UTF-8", "UTF-8", "no text"),
        reasons,
        strict=True,
    ):
        assert words in reason
    assert {i.text for i in read_all(tmp_path) if isinstance(i, Document)} == {"z", "good"}


def test_a_file_that_vanished_is_a_failure(tmp_path: Path) -> None:
    (item,) = read(FileRange(f"file://{tmp_path}/gone.txt", "gone.txt", Format.TEXT, ""), Columns())
    assert isinstance(item, Failure)
    assert "FileNotFoundError" in item.reason


def test_sources_that_are_none_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="check the path"):
        list_source(str(tmp_path / "nowhere"))
    (tmp_path / ".x").write_bytes(b"x")
    with pytest.raises(InvalidField, match=r"no file to read; 1 are left out \(.*\.x: is hidden"):
        list_source(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"x")
    (piece,) = list_source(str(tmp_path), Format.CSV).pieces
    assert (piece.format, piece.guessed) == (Format.CSV, False)
    with pytest.raises(InvalidField, match="cannot be opened"):
        list_source("nosuch://x")
    monkeypatch.setattr(files, "FILES_MAX", 0)
    with pytest.raises(ResourceExhausted, match="Parquet"):
        list_source(str(tmp_path))


def test_what_is_no_file_is_named_and_nothing_waits_for_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.txt").write_text("plain")
    os.mkfifo(source / "pipe.txt")
    (source / "gone.txt").symlink_to("nowhere")
    (source / "other.bin").symlink_to("nowhere")
    os.mkfifo(source / "socket")
    (source / "deep/loop").symlink_to("..")
    (tmp_path / "link").symlink_to(source)
    listing = list_source(str(tmp_path / "link"))
    assert [piece.name for piece in listing.pieces] == ["a.txt"]
    at = f"file://{tmp_path}/link"
    assert listing.unlisted == {
        f"{at}/gone.txt": "is a broken link",
        f"{at}/pipe.txt": "is neither a file nor a link to one",
    }
    assert listing.left_out == {
        f"{at}/other.bin": "is a broken link",
        f"{at}/socket": "is neither a file nor a link to one",
    }


def test_a_link_to_a_file_changes_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "source/b.txt").symlink_to(tmp_path / "a.txt")
    (before,) = list_source(str(tmp_path / "source")).pieces
    os.utime(tmp_path / "a.txt", (1, 1))
    (after,) = list_source(str(tmp_path / "source")).pieces
    assert documents(tmp_path / "source") == {"b.txt": "one"}
    assert before.stamp != after.stamp


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open/a.txt").write_text("plain")
    (tmp_path / "shut").mkdir(mode=0)
    with as_nobody(tmp_path):
        listing = list_source(str(tmp_path))
        with pytest.raises(Unavailable, match="Permission denied"):
            list_source(str(tmp_path / "shut"))
    assert [piece.name for piece in listing.pieces] == ["open/a.txt"]
    ((url, reason),) = listing.unlisted.items()
    assert url == f"file://{tmp_path}/shut/"
    assert "Permission denied" in reason


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Permissions mean nothing to root: be somebody else meanwhile, who may enter `folder`."""
    if os.geteuid() != 0:
        yield
        return
    for shut in (folder, *folder.parents[:3]):
        if shut.stat().st_mode & 0o005 != 0o005:
            shut.chmod(0o755)  # pytest's own
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_secrets_and_archives_are_no_sources() -> None:
    with pytest.raises(InvalidField, match="contains a password") as caught:
        list_source("https://me:hunter2@127.0.0.1/docs/")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidField, match="unpack it first"):
        list_source("zip://::/tmp/a.zip")


class Web(SimpleHTTPRequestHandler):
    """A folder on the web, as most servers show one."""

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Web, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec keeps its HTTP session for good
def test_a_web_server_is_a_source(tmp_path: Path, web: str) -> None:
    pytest.importorskip("aiohttp")
    folder = tmp_path / "corpus/deep"
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "corpus/a.jsonl").write_text(lines)
    (folder / "b c.md").write_text("# Title")
    pq.write_table(pa.table({"id": ["p"], "text": ["parquet"]}), tmp_path / "corpus/d.parquet")
    expected = {row["id"]: row["text"] for row in ROWS}
    assert documents(f"{web}/corpus/a.jsonl") == expected
    assert documents(f"{web}/corpus") == {**expected, "p": "parquet", "deep/b%20c.md": "# Title"}
    before = list_source(f"{web}/corpus/a.jsonl").pieces[0].stamp
    os.utime(tmp_path / "corpus/a.jsonl", (1, 1))
    assert before != list_source(f"{web}/corpus/a.jsonl").pieces[0].stamp != ""
    with pytest.raises(NotFound, match="check the path"):
        list_source(f"{web}/nowhere/")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        list_source("http://127.0.0.1:1/corpus/")

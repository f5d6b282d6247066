"""Hostile files, read in a parser's process with limits."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.precompute.sources import readers, sandbox
from kintsugi.precompute.sources.files import FileRange, Format, list_source
from kintsugi.precompute.sources.parser_process import ParserLimits
from kintsugi.precompute.sources.readers import Columns, Document, Failure, read
from kintsugi.precompute.sources.sandbox import _ParserEnded, parse_answer, read_confined

MIB = 1 << 20
PIECE = FileRange("file:///corpus/a.jsonl", "a.jsonl", Format.JSONL, "")


@pytest.fixture(autouse=True)
def no_idle_parsers() -> Iterator[None]:
    yield
    sandbox.close_idle_parsers()


def read_file(path: Path, **limits: Any) -> list[Document | Failure]:
    (piece,) = list_source(str(path)).pieces
    return list(read_confined(piece, Columns(), limits=ParserLimits(**limits)))


def write_bomb(path: Path, chars: int) -> None:
    """A row of one text that compresses to nothing."""
    pq.write_table(pa.table({"text": ["x" * chars]}), path, compression="zstd")


def test_it_reads_what_the_reader_reads(tmp_path: Path) -> None:
    rows = [{"id": f"d{n}", "text": f"text {n} \u00e9", "topic": "tea"} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join([*map(json.dumps, rows), "{", '{"text": "\\ud800"}']))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    (tmp_path / "c.md").write_text("# Title")
    for piece in list_source(str(tmp_path)).pieces:
        assert list(read_confined(piece, Columns())) == list(read(piece, Columns()))


def test_a_parsers_pipe_may_have_any_descriptor(tmp_path: Path) -> None:
    """`select.select` takes none above 1023."""
    (tmp_path / "a.txt").write_text("plain")
    with contextlib.ExitStack() as held:
        while (descriptor := os.dup(0)) < 1100:
            held.callback(os.close, descriptor)
        held.callback(os.close, descriptor)
        (document,) = read_file(tmp_path / "a.txt")
    assert isinstance(document, Document)


def test_a_parquet_bomb_costs_its_file_alone(tmp_path: Path) -> None:
    write_bomb(tmp_path / "bomb.parquet", 1 << 27)
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    (failure,) = read_file(tmp_path / "bomb.parquet", memory_bytes_max=100 * MIB)
    assert isinstance(failure, Failure)
    assert "memory" in failure.reason or "malloc" in failure.reason
    (tmp_path / "a.txt").write_text("plain")
    (document,) = read_file(tmp_path / "a.txt", memory_bytes_max=100 * MIB)
    assert isinstance(document, Document)


def test_a_file_does_not_stand_for_rows_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "DOCUMENT_BYTES_MAX", 10_000)
    monkeypatch.setattr(readers, "PARQUET_EXPANSION_MAX", 10)
    table = pa.table({"text": pa.array(["same"] * 4_000).dictionary_encode()})
    pq.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    (piece,) = list_source(str(tmp_path / "rows.parquet")).pieces
    *documents, last = read(piece, Columns())
    assert 0 < len(documents) < 1_000
    assert isinstance(last, Failure)
    assert "times its size" in last.reason


def test_a_document_that_takes_too_long_ends_its_parser(tmp_path: Path) -> None:
    (tmp_path / "slow.html").write_text("<table><tr><td>x</td></tr></table>" * 100_000)
    (failure,) = read_file(tmp_path / "slow.html", cpu_s_max=0.5)
    assert isinstance(failure, Failure)
    assert "CPU seconds" in failure.reason
    assert not sandbox._idle


def test_a_parser_that_dies_costs_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * 99}) + "\n" for _ in range(50_000)))
    (piece,) = list_source(str(tmp_path)).pieces
    reading = read_confined(piece, Columns(), limits=ParserLimits())
    assert isinstance(next(reading), Document)
    os.kill(inspect.getgeneratorlocals(reading)["parser"]._process.pid, signal.SIGKILL)
    *_, last = reading
    assert isinstance(last, Failure)
    assert "status -9" in last.reason


def test_a_file_that_never_comes_is_given_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    piece = FileRange(f"file://{tmp_path}/pipe.txt", "pipe.txt", Format.TEXT, "")
    (failure,) = read_confined(piece, Columns(), limits=ParserLimits(wait_s_max=2.0))
    assert isinstance(failure, Failure)
    assert "no document was read for 2 seconds" in failure.reason


def test_one_process_reads_one_file_after_another(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    pids = set()
    for piece in list_source(str(tmp_path)).pieces:
        assert list(read_confined(piece, Columns()))
        pids.add(sandbox._idle[0]._process.pid)
    assert len(pids) == 1


def test_a_charset_that_no_web_page_has_is_refused_at_once(tmp_path: Path) -> None:
    """Decoding a megabyte of punycode takes minutes."""
    (tmp_path / "a.html").write_bytes(b"<meta charset=punycode>-" + b"a" * MIB)
    (failure,) = read_file(tmp_path / "a.html", cpu_s_max=5.0)
    assert isinstance(failure, Failure)
    assert "charset" in failure.reason


def document(**values: Any) -> bytes:
    base = {"place": 0, "document_id": "d", "text": "t", "version": "", "markdown": False}
    return json.dumps({"document": {**base, **values}}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"document": 1}',
        document(place=-1),
        document(place=1 << 63),
        document(url="file:///etc/passwd", other=1),
        b'{"failure": {"place": 0}}',
    ],
)
def test_a_parser_that_was_taken_over_is_not_believed(answer: bytes) -> None:
    with pytest.raises(_ParserEnded, match="its parser sent an invalid answer"):
        parse_answer(answer, PIECE)


def test_a_parser_cannot_name_another_file(tmp_path: Path) -> None:
    found = parse_answer(document(url="file:///etc/passwd"), PIECE)
    assert isinstance(found, Document)
    assert found.url == PIECE.url
    assert isinstance(parse_answer(document(text="\ud800"), PIECE), Failure)
    assert parse_answer(b'{"end": true}', PIECE) is None

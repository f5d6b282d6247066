"""The text of PDF and DOCX files, and hostile ones."""

from __future__ import annotations

import io
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("docx", reason="install the extra `precompute`")
pytest.importorskip("pypdf", reason="install the extra `precompute`")

import docx
import pypdf

from kintsugi.precompute.sources import office, sandbox
from kintsugi.precompute.sources.files import list_source
from kintsugi.precompute.sources.office import extract_docx, extract_pdf
from kintsugi.precompute.sources.parser_process import ParserLimits
from kintsugi.precompute.sources.readers import Columns, Document, Failure


def pdf_of(*pages: str, password: str | None = None) -> bytes:
    """A PDF file with a line of text on each page."""
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    for text in pages:
        page = writer.add_blank_page(300, 300)
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
        named = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
        fonts = DictionaryObject({NameObject("/F1"): named})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 10 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = stream.flate_encode()
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    return written(writer.write)


def written(write: object) -> bytes:
    file = io.BytesIO()
    assert callable(write)
    write(file)
    return file.getvalue()


def docx_file() -> bytes:
    document = docx.Document()
    document.add_heading("Keyboards", 1)
    document.add_paragraph("The keys wear.")
    table = document.add_table(2, 2)
    for row, texts in zip(table.rows, (("article", "price"), ("KB-5", "29.00 EUR")), strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    document.add_paragraph("")
    document.add_paragraph("After the table.")
    return written(document.save)


def read_confined(path: Path, limits: ParserLimits | None = None) -> Document | Failure:
    (piece,) = list_source(str(path)).pieces
    try:
        (item,) = sandbox.read_confined(piece, Columns(), limits)
    finally:
        sandbox.close_idle_parsers()
    return item


def test_pages_of_a_pdf_file(tmp_path: Path) -> None:
    (tmp_path / "a.PDF").write_bytes(pdf_of("The first page.", "The second page."))
    item = read_confined(tmp_path / "a.PDF")
    assert isinstance(item, Document)
    assert item.text == "The first page.\n\nThe second page.\n"


def test_paragraphs_and_tables_of_a_docx_file(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(docx_file())
    item = read_confined(tmp_path / "a.docx")
    assert isinstance(item, Document)
    table = "article | price\nKB-5 | 29.00 EUR"
    assert item.text == f"Keyboards\n\nThe keys wear.\n\n{table}\n\nAfter the table.\n"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.pdf", b"%PDF-1.7 broken", "cannot be read"),
        ("a.pdf", pdf_of("x")[:200], "cannot be read"),
        ("a.pdf", pdf_of("secret", password="hunter2"), "needs a password"),
        ("a.pdf", pdf_of(""), "has no text"),
        ("a.docx", b"PK\x03\x04 broken", "cannot be read"),
        ("a.docx", docx_file()[:-100], "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_failure(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    item = read_confined(tmp_path / name)
    assert isinstance(item, Failure)
    assert not item.left_out
    assert words in item.reason


def test_a_zip_bomb_is_refused_before_it_is_unpacked() -> None:
    file = io.BytesIO(docx_file())
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/media/image.png", bytes(office.UNPACKED_BYTES_MAX))
    assert len(file.getvalue()) < 1 << 20
    with pytest.raises(ValueError, match=r"unpacks to \d+ bytes"):
        extract_docx(file.getvalue())


@pytest.mark.parametrize("is_bomb", [True, False])
def test_entities_of_a_docx_file_are_not_resolved(tmp_path: Path, is_bomb: bool) -> None:
    (tmp_path / "secret").write_text("hunter2")
    if is_bomb:
        names = "abcdefghij"
        tens = (f'<!ENTITY {one} "{f"&{name};" * 10}">' for name, one in pairwise(names))
        entities = '<!ENTITY a "aaaaaaaaaa">' + "".join(tens)
    else:
        entities = f'<!ENTITY j SYSTEM "file://{tmp_path}/secret">'
    with (
        zipfile.ZipFile(io.BytesIO(docx_file())) as source,
        zipfile.ZipFile(tmp_path / "a.docx", "w") as archive,
    ):
        for name in source.namelist():
            data = source.read(name)
            if name == "word/document.xml":
                body = data[data.index(b"<w:document") :].replace(b"The keys wear.", b"&j;")
                data = f"<!DOCTYPE d [{entities}]>".encode() + body
            archive.writestr(name, data)
    item = read_confined(tmp_path / "a.docx")
    assert isinstance(item, Failure) if is_bomb else isinstance(item, Document)
    assert "hunter2" not in str(item)


def test_pages_and_characters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pdf_of("one", "two", "three")
    monkeypatch.setattr(office, "TEXT_CHARS_MAX", 9)
    with pytest.raises(ValueError, match="more than 9 characters"):
        extract_pdf(data)
    monkeypatch.setattr(office, "PAGES_MAX", 2)
    with pytest.raises(ValueError, match="has 3 pages; at most 2"):
        extract_pdf(data)


def test_a_pdf_bomb_ends_its_parser_alone(tmp_path: Path) -> None:
    """Each stream expands a thousandfold; the memory of the parser bounds what they take together."""
    from pypdf.generic import DecodedStreamObject, NameObject

    writer = pypdf.PdfWriter()
    stream = DecodedStreamObject()
    stream.set_data(b"BT (x) Tj ET " * 4_000_000)
    page = writer.add_blank_page(300, 300)
    page[NameObject("/Contents")] = stream.flate_encode()
    (tmp_path / "bomb.pdf").write_bytes(written(writer.write))
    assert (tmp_path / "bomb.pdf").stat().st_size < 1 << 20
    item = read_confined(tmp_path / "bomb.pdf", ParserLimits(200 << 20, 5.0))
    assert isinstance(item, Failure)

"""Extracts the text of PDF and DOCX files.

Their authors may be hostile, so these functions run in the parser process, whose limits bound memory and
time. The libraries raise any error for a broken file.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable

OFFICE_BYTES_MAX = 64 << 20
"""Maximum size of a file, most of which is usually images."""
PAGES_MAX = 5_000
UNPACKED_BYTES_MAX = 128 << 20
"""Maximum size of a DOCX file's parts, images included: the library holds all of them in memory."""
TEXT_CHARS_MAX = 16 << 20


def extract_pdf(data: bytes) -> str:
    """Return the text of the pages, with blank lines between them. A scanned page has none. Raises
    `ValueError` for a file that needs a password or exceeds a limit."""
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("needs a password; save it without one")
    if len(reader.pages) > PAGES_MAX:
        raise ValueError(f"has {len(reader.pages)} pages; at most {PAGES_MAX} are read: split it")
    return _join_blocks(page.extract_text().strip() for page in reader.pages)


def extract_docx(data: bytes) -> str:
    """Return the text of the paragraphs and tables, with blank lines between them; each row of a table is a
    line. Raises `ValueError` for a file that exceeds a limit."""
    from docx import Document
    from docx.table import Table

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > UNPACKED_BYTES_MAX:
        raise ValueError(f"unpacks to {size} bytes; at most {UNPACKED_BYTES_MAX} are read: remove its images")
    return _join_blocks(
        "\n".join(" | ".join(cell.text for cell in row.cells) for row in block.rows)
        if isinstance(block, Table)
        else block.text
        for block in Document(io.BytesIO(data)).iter_inner_content()
    )


def _join_blocks(blocks: Iterable[str]) -> str:
    kept, chars = [], 0
    for block in blocks:
        chars += len(block) + 2
        if chars > TEXT_CHARS_MAX:
            raise ValueError(f"has more than {TEXT_CHARS_MAX} characters; split it")
        if block.strip():
            kept.append(block)
    return "\n\n".join(kept)

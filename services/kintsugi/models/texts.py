"""Reads a text file that a user names."""

from __future__ import annotations

from pathlib import Path

from kintsugi.core.errors import InvalidField, NotFound

TEXT_BYTES_MAX = 1 << 20
"""Larger files are refused: they may be checkpoints, and would be tokenised whole."""


def read_user_text(path: Path, option: str, purpose: str) -> str:
    """Return the text of a file, with unchanged line endings.

    ``option`` (the setting's name) and ``purpose`` (the expected content) appear in errors. Raises `NotFound`
    for a missing file, `InvalidField` for one that is not UTF-8 text or larger than `TEXT_BYTES_MAX`.
    """
    if not path.is_file():
        raise NotFound(f"{path} is not a file; name {purpose}")
    with path.open("rb") as file:
        content = file.read(TEXT_BYTES_MAX + 1)
    if len(content) > TEXT_BYTES_MAX:
        raise InvalidField(option, f"{path} has more than {TEXT_BYTES_MAX} bytes; name {purpose}")
    try:
        return content.decode()  # reading as text would translate line endings
    except UnicodeDecodeError:
        raise InvalidField(option, f"{path} is not UTF-8 text; convert it first") from None

"""How a measurement keeps its blocks in vLLM's prefix cache to itself.

Its requests have a salt of their own: the namespace's, and behind `SEPARATOR` the measurement's name. The
connector gives salts to requests as it renames their blocks (`scheduler.hashing`), and keeps what stands
behind the separator.
"""

from __future__ import annotations

SEPARATOR = "\0\0"
"""In no namespace, and in no salt that an erasure makes (`scheduler.salts`)."""


def measured_salt(salt: str | None, measurement: str) -> str | None:
    """The salt of a measurement's requests; that of all others where ``measurement`` is empty."""
    return f"{salt or ''}{SEPARATOR}{measurement}" if measurement else salt


def split_salt(salt: str | None) -> tuple[str | None, str]:
    """The salt without the measurement, and the measurement's name: empty for other requests."""
    if salt is None:
        return None, ""
    plain, _, measurement = salt.partition(SEPARATOR)
    return plain, measurement

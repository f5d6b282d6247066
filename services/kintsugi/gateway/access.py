"""Writes the entries of a tokens file, and checks whether a gateway may be reachable from other machines."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.store.protocol.access import Grant, Verb, parse_document, read_values, token_digest
from kintsugi.store.protocol.files import lock_folder
from kintsugi.store.protocol.tls import is_loopback

TOKEN_PREFIX = "kg_"
"""Prefix by which scanners for leaked secrets recognise a token."""


def new_token(
    name: str,
    namespaces: Sequence[str],
    verbs: Sequence[Verb] | None = None,
    expires: str | None = None,
) -> tuple[str, Grant]:
    """Return a new token and its entry for the file. Raises `InvalidField`."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    given = None if verbs is None else tuple(verbs)
    return token, Grant(
        name=name,
        namespaces=tuple(namespaces),
        verbs=given,
        sha256=token_digest(token),
        expires=expires,
    )


def add_grant(path: Path, grant: Grant) -> None:
    """Append an entry atomically. A missing file is created, readable only by its owner.

    Raises `InvalidField` for an invalid file, or if the file has a token with the same name.
    """

    def add(tokens: list[Any]) -> None:
        if any(entry["name"] == grant.name for entry in tokens):
            raise InvalidField("name", f"{grant.name!r} has a token in {path}; remove it there first")
        tokens.append({name: value for name, value in asdict(grant).items() if value not in (None, False)})

    _change_tokens(path, add)


def revoke_grant(path: Path, name: str) -> None:
    """Mark a token as revoked, atomically. Its entry stays. Raises `InvalidField` for an invalid file, and
    `NotFound`."""

    def revoke(tokens: list[Any]) -> None:
        named = [entry for entry in tokens if entry["name"] == name]
        if not named:
            raise NotFound(f"{path} has no token named {name!r}; look its name up there")
        for entry in named:
            entry["revoked"] = True

    _change_tokens(path, revoke)


def _change_tokens(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Rewrite the file's tokens, and keep its other contents. Processes take turns, because a lost change
    could be a revocation."""
    try:
        with lock_folder(path.parent):
            values = read_values(path) if path.exists() else {"tokens": []}
            parse_document(values, path)
            change(values["tokens"])
            parse_document(values, path)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # mode 0600
                file.write(json.dumps(values, indent=2) + "\n")
            os.replace(file.name, path)
    except OSError as error:
        raise InvalidField("file", f"{path} cannot be written ({error.strerror})") from error


def check_exposure(listen: str, has_tokens: bool, has_tls: bool, insecure: bool) -> None:
    """Raise `InvalidField` for an address beyond loopback without tokens and TLS, unless ``insecure``:
    without TLS, a token can be read on its way."""
    if insecure or is_loopback(listen) or (has_tokens and has_tls):
        return
    missing = " and ".join(
        name
        for name, has in (("--tokens-file", has_tokens), ("--tls-cert with --tls-key", has_tls))
        if not has
    )
    raise InvalidField(
        "listen", f"{listen} can be reached from other machines: give {missing}, or pass --insecure"
    )

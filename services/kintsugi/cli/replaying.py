"""Finds the erasures that were made after a backup, and repeats them in the restored files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import options_of
from kintsugi.store.client.registry import open_directory
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.shard.erasure.records import Erasures
from kintsugi.store.shard.erasure.scope import scopes_of

UNSURE_S = 600.0
"""An erasure requested up to this long before a backup may have reached the files only after it."""


def find_erasures(store_url: str | None, shard_folders: Sequence[Path], since_s: float) -> list[Erasure]:
    """Return the recorded erasures that were requested since `since_s` (Unix seconds), less `UNSURE_S`. Reads
    the records of running shards and of the given data folders.

    Raises `Unavailable` if a shard of the store does not answer, `InvalidField` for a URL that names no
    shards.
    """
    logs = [folder / "erasures" for folder in shard_folders]
    found = [one for log in logs if log.is_dir() for one in _read_log(log)]
    if store_url is not None:
        found += _ask_shards(store_url)
    return [erasure for erasure in dict.fromkeys(found) if erasure.at_s >= since_s - UNSURE_S]


def replay(erasures: Sequence[Erasure], ledger_folder: Path | None, texts_folder: Path | None) -> None:
    """Repeat the erasures in a ledger and in a gateway's known texts. Raises the errors of both."""
    if not erasures:
        return
    if ledger_folder is not None:
        # Only the extra `precompute` installs what this module imports.
        from kintsugi.precompute.ledger import Ledger

        with closing(Ledger(ledger_folder)) as ledger:
            for scope in scopes_of(erasures):
                if scope.keys is None:
                    ledger.erase_namespace(scope.namespace)
                else:
                    ledger.erase_chunks(scope.namespace, sorted(scope.keys))
    if texts_folder is not None:
        with closing(KnownChunks(texts_folder)) as known:
            for scope in scopes_of(erasures):
                known.erase(scope.namespace, scope.keys, scope.until_s)


def _read_log(folder: Path) -> Sequence[Erasure]:
    with closing(Erasures(folder)) as log:
        return log.after(0, max(1, len(log)), learned=True).erasures


def _ask_shards(url: str) -> Iterator[Erasure]:
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        addresses, options = [parts.netloc], options_of(parts.query)
    else:
        directory, options = open_directory(url)
        with closing(directory):
            addresses = [shard.address for shard in directory.current().shards]
    for address in addresses:
        with closing(GrpcStore(address, options)) as store:
            seen, shard_id = -1, ""
            while seen != (page := store.list_erasures(shard_id, max(seen, 0), learned=True)).next:
                yield from page.erasures
                seen, shard_id = page.next, page.shard_id

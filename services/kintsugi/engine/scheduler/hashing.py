"""Names of blended KV in vLLM's prefix cache.

vLLM names a full block by a hash chained over the tokens before it. Blended KV of the same tokens differs, so
a request's chain is forked at the first block that may hold blended KV: its name is derived from the ordinary
name and a tag (the plan's digest), and later names are chained to it. Blocks before the fork keep their names
and are shared with plain requests; a later turn with the same plan gets the same names.

The first name depends on the request's salt. A measurement does not share its blocks: its salt is the
namespace's, followed by `SEPARATOR` and the measurement's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import blake3

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

    BlockHasher = Callable[[Request], list[BlockHash]]


SEPARATOR = "\0\0"
"""A separator that occurs in no namespace, and in no salt of an erased namespace (`scheduler.salts`)."""


def measured_salt(salt: str | None, measurement: str) -> str | None:
    """Return the salt of a measurement's requests; the plain salt if ``measurement`` is empty."""
    return f"{salt or ''}{SEPARATOR}{measurement}" if measurement else salt


def split_salt(salt: str | None) -> tuple[str | None, str]:
    """Split a salt into the plain salt and the measurement's name, which is empty for other requests."""
    if salt is None:
        return None, ""
    plain, _, measurement = salt.partition(SEPARATOR)
    return plain, measurement


class _Beginning:
    """A request cut to its first `num_tokens` tokens, so that a block hasher names only their blocks."""

    def __init__(self, request: Request, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def set_salt(request: Request, salt: str | None) -> None:
    """Set the request's `cache_salt` to ``salt``, and rename its blocks if it changed. A measurement keeps
    its own part."""
    salt = measured_salt(split_salt(salt)[0], split_salt(request.cache_salt)[1])
    if request.cache_salt != salt:
        request.cache_salt = salt
        _rename(request, 0)


def fork(request: Request, first_block: int, tag: bytes, block_size: int, salt: str | None) -> None:
    """Set the salt as `set_salt` does, and fork the names of blocks of ``block_size`` tokens from
    ``first_block`` on, future blocks included. Every block is hashed once; earlier blocks keep their
    names."""
    salt = measured_salt(split_salt(salt)[0], split_salt(request.cache_salt)[1])
    kept = first_block if request.cache_salt == salt else 0
    request.cache_salt = salt
    ordinary = request._block_hasher
    if ordinary is not None:
        request._block_hasher = _ForkedHasher(ordinary, first_block, tag, block_size)
        _rename(request, kept)


def unfork(request: Request, ordinary: BlockHasher | None) -> None:
    """Restore the exact names of the request's blocks."""
    request._block_hasher = ordinary
    _rename(request, 0)


def _rename(request: Request, first_block: int) -> None:
    del request.block_hashes[first_block:]
    request.update_block_hashes()


def exact_tokens(request: Request) -> int | None:
    """Return the tokens before the first fork, a multiple of the block size; None if not forked."""
    hasher = request._block_hasher
    return hasher.exact_tokens if isinstance(hasher, _ForkedHasher) else None


class _ForkedHasher:
    """Block hasher that forks the names of ``ordinary``, which may be forked itself, at ``first_block``."""

    def __init__(self, ordinary: BlockHasher, first_block: int, tag: bytes, block_size: int) -> None:
        self._ordinary = ordinary
        self._first_block = first_block
        self._tag = tag
        self._block_size = block_size
        self._fork_at = first_block * block_size
        inner = ordinary.exact_tokens if isinstance(ordinary, _ForkedHasher) else self._fork_at
        self.exact_tokens: int = min(self._fork_at, inner)

    def __call__(self, request: Request) -> list[BlockHash]:
        known, ordinary = request.block_hashes, self._ordinary
        if len(known) > self._first_block:
            return ordinary(request)
        until_fork = min(request.num_tokens, self._fork_at + self._block_size)
        head = ordinary(cast("Request", _Beginning(request, until_fork)))
        if len(known) + len(head) <= self._first_block:
            return head
        head[-1] = type(head[-1])(blake3.blake3(self._tag + head[-1]).digest())
        # The ordinary hasher continues from the last known name: show it the renamed block.
        known.extend(head)
        tail = ordinary(request)
        del known[len(known) - len(head) :]
        return head + tail

"""Names for blended KV in vLLM's prefix cache.

vLLM names a full block by a hash chained over the tokens before it. Blended KV of the same tokens is
not that KV, so a request's chain is forked at the first block that can hold any: the name there is
derived from the ordinary one and a tag (the plan's digest), and later names chain on from it. Blocks
before the fork keep their names and are shared with plain requests; a later turn with the same plan
arrives at the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import blake3

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

    BlockHasher = Callable[[Request], list[BlockHash]]


def set_salt(request: Request, salt: str) -> None:
    """Make `salt` the request's `cache_salt` and name its blocks anew."""
    request.cache_salt = salt
    _rename(request, 0)


def fork(request: Request, first_block: int, tag: bytes) -> None:
    """Rename blocks from `first_block` on, those that are yet to fill included."""
    ordinary = request._block_hasher
    if ordinary is not None:
        request._block_hasher = _forked(ordinary, first_block, tag)
        _rename(request, first_block)


def unfork(request: Request, ordinary: BlockHasher | None) -> None:
    """Give the request the exact names of its tokens again."""
    request._block_hasher = ordinary
    _rename(request, 0)


def _rename(request: Request, first_block: int) -> None:
    del request.block_hashes[first_block:]
    request.update_block_hashes()


def _forked(ordinary: BlockHasher, first_block: int, tag: bytes) -> BlockHasher:
    def hasher(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        fresh = ordinary(request)
        index = first_block - len(known)
        if not 0 <= index < len(fresh):
            return fresh
        renamed = type(fresh[index])(blake3.blake3(tag + fresh[index]).digest())
        head = [*fresh[:index], renamed]
        # The ordinary hasher chains on from the last known name: show it the renamed block.
        known.extend(head)
        tail = ordinary(request)
        del known[len(known) - len(head) :]
        return head + tail

    return hasher

"""A gateway whose store has keys: chunks are named with them, and nothing is stored without them."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import PermissionDenied
from kintsugi.core.spaces import ChunkSpace
from kintsugi.sdk.client import Client
from kintsugi.store.client.ram import RamStore
from tests.integration.serving.gateways import Setup, running

NAMESPACE = "tenant"
CONTEXT = tuple(range(900, 940))
PASSAGES = [f"The {name} passage is about {name} things, " + "and goes on, " * 9 for name in "ab"]
QUESTION = "\nQuestion: which?\nAnswer:"


class NamingStore(RamStore):
    """Has a name key for one namespace; the keys of another were destroyed."""

    def name_key(self, namespace: str) -> bytes:
        if namespace == "destroyed":
            raise PermissionDenied("the keys of namespace 'destroyed' were destroyed")
        return bytes(range(32)) if namespace == NAMESPACE else b""


def test_chunks_are_put_found_and_deleted_by_keyed_names() -> None:
    setup = Setup(context_token_ids=CONTEXT, store=NamingStore())
    with running(setup) as gateway, Client(gateway.address, NAMESPACE) as client:
        put = client.put_chunks(PASSAGES)
        space = gateway.backend.space(NAMESPACE)
        assert space.name_key
        guessed = ChunkSpace(space.fingerprint, NAMESPACE, space.prefix_token_ids, True, CONTEXT)
        held = gateway.store.list(NAMESPACE)
        assert len(held) == 2 * len(PASSAGES)
        assert not {m.space_digest for m in held} & {copy.digest for copy in guessed.copies()}
        assert client.generate(PASSAGES, QUESTION).accounting["chunks_hit"] == len(PASSAGES)
        assert [one.new for one in client.put_chunks(PASSAGES)] == [False, False]
        assert client.generate(put, QUESTION).accounting["chunks_hit"] == len(PASSAGES)
        assert client.delete_chunk(put[0].key)
        assert len(gateway.store.list(NAMESPACE)) == 2


def test_a_namespace_whose_keys_were_destroyed_is_refused() -> None:
    with running(Setup(store=NamingStore())) as gateway, Client(gateway.address, "destroyed") as client:
        with pytest.raises(PermissionDenied, match="were destroyed"):
            client.put_chunks(PASSAGES)
        with pytest.raises(PermissionDenied, match="were destroyed"):
            client.generate(PASSAGES, QUESTION)
        assert gateway.backend.seen.saves == []

"""A gateway over engines with a context: clients see chunks, the store holds two copies of each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces import NamespacePrivacy, NamespaceRules
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.fill import FillConfig
from kintsugi.sdk.client import Client
from kintsugi.store.protocol.access import ANYONE
from tests.integration.serving.gateways import Running, Setup, running

NAMESPACE = "tenant"
CONTEXT = tuple(range(900, 940))
PASSAGES = [
    f"The {name} passage is about {name} things, " + "and goes on for a while, " * 8 for name in "abc"
]
QUESTION = "\nQuestion: which?\nAnswer:"
PREPARED = Setup(context_token_ids=CONTEXT)
FILLING = replace(PREPARED, gateway={"fill": FillConfig(sights=1)})


def copies_of(gateway: Running, text: str) -> list[ChunkKey]:
    """The keys of the prepared chunk and of its plain copy."""
    (resolved,) = gateway.run(gateway.gateway.tokenize(ANYONE, NAMESPACE, [text]))
    return [ChunkKey.of(copy, resolved.token_ids) for copy in gateway.backend.space(NAMESPACE).copies()]


def held(gateway: Running, keys: list[ChunkKey]) -> list[bool]:
    return [manifest is not None for manifest in gateway.store.lookup(NAMESPACE, keys)]


def test_a_chunk_is_put_and_used_in_both_copies() -> None:
    with running(PREPARED) as gateway, Client(gateway.address, NAMESPACE) as client:
        put = client.put_chunks(PASSAGES)
        keys = [copies_of(gateway, text) for text in PASSAGES]
        assert [one.key for one in put] == [prepared.hex for prepared, _ in keys], (
            "the name is the prepared key"
        )
        assert gateway.store.stats().chunks == 2 * len(PASSAGES)
        for order in (PASSAGES, PASSAGES[::-1]):
            assert client.generate(order, QUESTION).accounting["chunks_hit"] == len(PASSAGES)
        listed = {ChunkKey.from_hex(one.key) for one in client.list_chunks()}
        assert listed == {key for pair in keys for key in pair}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("shared", ["", "elsewhere"])
def test_a_chunk_is_missing_where_either_copy_is(lost: int, shared: str) -> None:
    rules = NamespaceRules(privacy={NAMESPACE: NamespacePrivacy(shared=shared)})
    setup = replace(PREPARED, gateway={"rules": rules})
    with running(setup) as gateway, Client(gateway.address, NAMESPACE) as client:
        client.put_chunks(PASSAGES)
        keys = copies_of(gateway, PASSAGES[1])
        gateway.store.delete(NAMESPACE, keys[lost : lost + 1])
        states = [one.new for one in client.put_chunks(PASSAGES)]
        assert states == [False, True, False]
        assert held(gateway, keys) == [True, True]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_copy_is_filled(lost: int) -> None:
    with running(FILLING) as gateway, Client(gateway.address, NAMESPACE) as client:
        client.put_chunks(PASSAGES)
        text = PASSAGES[1 - lost]  # the second chunk needs the prepared copy, the first the plain one
        keys = copies_of(gateway, text)
        gateway.store.delete(NAMESPACE, keys[lost : lost + 1])
        assert client.generate(PASSAGES, QUESTION).accounting["chunks_missed"] == 1
        assert gateway.eventually(lambda: held(gateway, keys) == [True, True])
        assert client.generate(PASSAGES, QUESTION).accounting["chunks_missed"] == 0


def test_without_plain_copies_nothing_is_filled_for_the_first_chunk() -> None:
    setup = replace(FILLING, plain_copies=False)
    with running(setup) as gateway, Client(gateway.address, NAMESPACE) as client:
        client.put_chunks(PASSAGES)
        assert gateway.store.stats().chunks == len(PASSAGES)
        assert client.generate(PASSAGES, QUESTION).accounting["chunks_missed"] == 1
        assert client.generate([*PASSAGES, "Something that is new here."], QUESTION).outcome == "blended"
        assert gateway.eventually(lambda: len(gateway.backend.seen.saves) == 2)
        ((new,),) = [save[2] for save in gateway.backend.seen.saves[1:]]
        assert held(gateway, [ChunkKey.of(gateway.backend.space(NAMESPACE), new)]) == [True]
        assert gateway.store.stats().chunks == len(PASSAGES) + 1


@pytest.mark.parametrize("text", [PASSAGES[0], "Shorter than an anchor."])
@pytest.mark.parametrize("named", [0, 1])
@pytest.mark.parametrize("forgotten", [False, True])
def test_deleting_a_chunk_deletes_both_copies(text: str, named: int, forgotten: bool) -> None:
    with running(PREPARED) as gateway, Client(gateway.address, NAMESPACE) as client:
        client.put_chunks([text, PASSAGES[2]])
        keys, others = copies_of(gateway, text), copies_of(gateway, PASSAGES[2])
        if forgotten:
            gateway.gateway.known.erase(NAMESPACE, [keys[0]], math.inf)
        assert client.delete_chunk(keys[named].hex)
        assert held(gateway, keys) == [False, False]
        assert held(gateway, others) == [True, True]
        assert not client.delete_chunk(keys[named].hex)


def test_a_chunk_may_not_leave_less_room_than_prefix_and_context_take() -> None:
    short = replace(PREPARED, max_model_len=64)
    with running(short) as gateway, Client(gateway.address, NAMESPACE) as client:
        too_long = pytest.raises(InvalidField, match="this model takes 22")
        with too_long:
            client.put_chunks(PASSAGES[:1])

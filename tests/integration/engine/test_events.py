"""vLLM's own KV events: blended blocks are never announced under the tokens that they do not hold exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kintsugi.engine.local import LocalEngine
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask,
    ask_cold,
    chunks_of,
    rag,
    random_tokens,
)

pytestmark = pytest.mark.engine

BLOCK = 32


class Subscriber:
    """Reads what vLLM's publisher sends, over its socket."""

    def __init__(self) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.bind("tcp://127.0.0.1:*")
        # vLLM's publisher connects to an endpoint that names a host.
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)

    def events(self, until: tuple[int, ...]) -> list[Any]:
        """Events up to the one that announces a block of the tokens ``until``."""
        seen: list[Any] = []
        while True:
            assert self._socket.poll(30_000), f"no block of {until[:3]}… was announced"
            seen += self._decoder.decode(self._socket.recv_multipart()[-1]).events
            if until in blocks_of(seen):
                return seen

    def hears(self) -> bool:
        """Whether something arrives within a tenth of a second."""
        return bool(self._socket.poll(100))

    def close(self) -> None:
        self._socket.close(linger=0)


def blocks_of(events: list[Any]) -> set[tuple[int, ...]]:
    """The tokens of each announced block."""
    stored = [event for event in events if hasattr(event, "token_ids")]
    assert all(len(event.token_ids) == len(event.block_hashes) * event.block_size for event in stored)
    return {
        tuple(event.token_ids[at : at + BLOCK])
        for event in stored
        for at in range(0, len(event.token_ids), BLOCK)
    }


def cut(token_ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(token_ids[at : at + BLOCK]) for at in range(0, len(token_ids) // BLOCK * BLOCK, BLOCK)]


@pytest.fixture(scope="module")
def subscriber() -> Iterator[Subscriber]:
    subscriber = Subscriber()
    yield subscriber
    subscriber.close()


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, subscriber: Subscriber) -> LocalEngine:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=subscriber.endpoint)
    engine = engine_slot.get("tiny-llama", kv_events_config=events)
    # What is sent before the sockets have met is lost.
    for seed in range(100):
        ask_cold(engine, random_tokens(2 * BLOCK, 7000 + seed))
        if subscriber.hears():
            break
    return engine


def test_only_exact_blocks_are_announced(engine: LocalEngine, subscriber: Subscriber) -> None:
    chunks = chunks_of(100, 120, 64, seed=31)
    engine.save(PREFIX, chunks, NAMESPACE)
    prompt = rag(*chunks)
    marker = random_tokens(2 * BLOCK, 8001)
    ask(engine, marker)
    saved = blocks_of(subscriber.events(cut(marker)[0]))
    # What a save leaves in the cache is exact, and announced.
    assert cut([*PREFIX, *chunks[0]])[0] in saved

    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.2), max_tokens=40)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"
    # A later turn finds them: vLLM announces blocks that are found, too.
    again = [*prompt.token_ids, *blended.token_ids]
    later = ask(engine, again, prompt.params(0.2))
    assert later.accounting is not None
    assert later.accounting["outcome"] == "prefix_hit"
    last = random_tokens(2 * BLOCK, 8002)
    ask(engine, last)
    announced = blocks_of(subscriber.events(cut(last)[0]))
    # The prefix and the first chunk behind it are exact: 101 tokens, three whole blocks.
    assert set(cut(again)[:3]) <= announced
    assert not set(cut(again)[3:]) & announced


def test_what_is_prefilled_in_full_is_announced(engine: LocalEngine, subscriber: Subscriber) -> None:
    token_ids = random_tokens(5 * BLOCK, 8003)
    ask_cold(engine, token_ids)
    assert set(cut(token_ids)) <= blocks_of(subscriber.events(cut(token_ids)[-1]))

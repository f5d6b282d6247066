"""Retrievers of LangChain and LlamaIndex that prefetch, against a gateway with a stub for an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from llama_index.core.retrievers import BaseRetriever as LlamaRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.sdk.client import AsyncClient, Client, ClientOptions
from kintsugi.sdk.langchain import KintsugiRetriever
from kintsugi.sdk.llama_index import KintsugiPrefetch
from kintsugi.sdk.prefetching import WAITING_MAX, Prefetcher
from tests.integration.serving.gateways import Running, running

TEXTS = ["First passage, of a handful of words.", "Second passage, of some other words."]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


class Noting(Client):
    """Notes what is prefetched and put."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefetched: list[tuple[list[str], int]] = []
        self.noted = threading.Event()

    def prefetch(self, segments: Any) -> Any:
        result = super().prefetch(segments)
        self.prefetched.append((list(segments), result.accepted))
        self.noted.set()
        return result


@pytest.fixture
def client(gateway: Running, request: pytest.FixtureRequest) -> Iterator[Noting]:
    with Noting(gateway.address, request.node.name.replace("[", "-").rstrip("]")) as opened:
        yield opened


class Found(BaseRetriever):  # type: ignore[misc]
    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [Document(page_content=text, metadata={"of": query}) for text in (*TEXTS, TEXTS[0])]


class LlamaFound(LlamaRetriever):  # type: ignore[misc]
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        metadata = {"file": "a.txt"}
        return [NodeWithScore(node=TextNode(text=text, metadata=metadata), score=0.5) for text in TEXTS]


@pytest.mark.parametrize("is_async", [False, True])
def test_langchain_gets_its_documents_and_they_are_prefetched(client: Noting, is_async: bool) -> None:
    client.put_chunks(TEXTS)
    retriever = KintsugiRetriever(retriever=Found(), client=client)
    found = asyncio.run(retriever.ainvoke("q")) if is_async else retriever.invoke("q")
    assert found == Found().invoke("q"), "as the other retriever found them"
    assert client.noted.wait(10)
    assert client.prefetched == [(TEXTS, 2)], "each once"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_postprocessor_prefetches_the_nodes_that_reach_the_prompt(client: Noting, is_async: bool) -> None:
    client.put_chunks(TEXTS)
    nodes = LlamaFound().retrieve("q")[:1]
    processor = KintsugiPrefetch(client)
    if is_async:
        assert asyncio.run(processor.apostprocess_nodes(nodes, query_str="q")) == nodes
    else:
        assert processor.postprocess_nodes(nodes, query_str="q") == nodes
    assert client.noted.wait(10)
    assert client.prefetched == [(TEXTS[:1], 1)], "without the metadata around them"


def test_what_is_not_stored_is_put_where_that_is_asked_for(client: Noting, gateway: Running) -> None:
    KintsugiRetriever(retriever=Found(), client=client, put=True).invoke("q")
    namespace = "test_what_is_not_stored_is_put_where_that_is_asked_for"
    assert gateway.eventually(lambda: len(gateway.store.list(namespace)) == 2)
    assert client.prefetched == [(TEXTS, 0)]


def test_a_gateway_that_is_gone_neither_fails_nor_delays_a_retrieval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ClientOptions(timeout_s=0.2, attempts=1)
    with Client("127.0.0.1:1", "docs", options=options) as client:
        found = KintsugiRetriever(retriever=Found(), client=client).invoke("q")
        assert len(found) == 3
        waiting = Prefetcher(client).prefetch(TEXTS)
        assert waiting is not None
        assert waiting.result(10) is None
    assert "not prefetched" in caplog.text


def test_calls_that_wait_are_bounded() -> None:
    class Stuck(Client):
        def __init__(self) -> None:
            self.go_on = threading.Event()

        def prefetch(self, segments: Any) -> Any:
            self.go_on.wait(10)
            raise Unavailable("stuck")

    stuck = Stuck()
    prefetcher = Prefetcher(stuck)
    begun = [prefetcher.prefetch(TEXTS) for _ in range(WAITING_MAX + 3)]
    assert begun[WAITING_MAX:] == [None] * 3
    stuck.go_on.set()
    assert [one.result(10) for one in begun if one is not None] == [None] * WAITING_MAX
    assert prefetcher.prefetch(TEXTS) is not None
    assert prefetcher.prefetch(["", " "]) is None, "nothing to fetch"


def test_an_asynchronous_client_is_refused(gateway: Running) -> None:
    async def make() -> None:
        async with AsyncClient(gateway.address, "docs") as client:
            with pytest.raises(InvalidField, match=r"kintsugi\.Client"):
                KintsugiRetriever(retriever=Found(), client=client)

    asyncio.run(make())

"""Unmodified LangChain and LlamaIndex: how much of the chunks that they paste into prompts is hit."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kintsugi.models.bundled import bundled_checkpoint, showcase
from kintsugi.precompute.chunking import Chunker
from tests.conftest import Figure
from tests.integration.serving.openai.conftest import CHUNKING, Served

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

EXAMPLES = Path(__file__).parents[4] / "examples"
HIT_RATE_MIN = 0.95
DOCUMENT = "\n".join(chunk.strip() for chunk in showcase().chunks)


@pytest.fixture(autouse=True)
def own_loop() -> Iterator[None]:
    """LlamaIndex makes this thread a loop if it has none, and leaves it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def check_hit_rate(texts: list[str], accounting: Mapping[str, Any], framework: str, figure: Figure) -> None:
    chunker = Chunker.of_model(bundled_checkpoint(), CHUNKING)
    sent = sum(len(chunker.token_ids(text)) for text in texts)
    rate = accounting["tokens_hit"] / sent
    figure("stuffing_hit_rate", framework, rate)
    assert len(texts) > 1
    assert rate >= HIT_RATE_MIN, accounting
    assert accounting["outcome"] == "blended"


def test_a_langchain_chain_hits(served: Served, figure: Figure) -> None:
    chain = example("langchain_rag").build_chain(
        served.url, served.grpc_address, "langchain", bundled_checkpoint(), [DOCUMENT], CHUNKING.tokens_max, 2
    )
    result = chain.invoke({"input": showcase().question})
    assert result["answer"]
    texts = [document.page_content for document in result["context"]]
    check_hit_rate(texts, served.engine.accountings[-1], "langchain", figure)


def test_a_llama_index_query_engine_hits(served: Served, figure: Figure) -> None:
    engine = example("llama_index_rag").build_query_engine(
        served.url,
        served.grpc_address,
        "llama-index",
        bundled_checkpoint(),
        [DOCUMENT],
        CHUNKING.tokens_max,
        2,
    )
    response = engine.query(showcase().question)
    assert str(response)
    texts = [source.node.get_content() for source in response.source_nodes]
    check_hit_rate(texts, served.engine.accountings[-1], "llama-index", figure)


def test_the_openai_example_answers_and_tells_what_it_cost(served: Served) -> None:
    show = showcase()
    stored = served.store("example-openai", show.chunks)
    answer = example("openai_client").ask(served.url, "example-openai", show.chunks, show.question, 2)
    assert answer.text
    # Storing the first chunk has left its beginning in vLLM's prefix cache.
    assert answer.accounting["tokens_hit"] + answer.accounting["tokens_prefix_cached"] >= stored


def test_the_rag_app_answers_from_what_it_retrieved(served: Served) -> None:
    show = showcase()
    documents = [(f"document-{index}", chunk) for index, chunk in enumerate(show.chunks)]
    answer, passages = example("rag_app").answered(
        served.grpc_address, "example-rag", bundled_checkpoint(), documents, show.question
    )
    assert {passage.document for passage in passages} == {name for name, _ in documents}
    assert answer.outcome == "blended"
    assert answer.accounting["chunks_missed"] == 0

"""Passages that come again, sent by OpenAI's own client, which says nothing of them, to `kintsugi serve`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kintsugi.models.passages import read_bundled_passages
from kintsugi.sdk.client import Client
from tests.integration.clients.conftest import ServiceUnderTest
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

CHUNK_GAP = "\n\n"
PASSAGE_WORDS = 180
"""About 256 tokens."""


def make_passages(count: int, seed: int) -> list[str]:
    """Made-up passages of real words."""
    words = sorted({word for passage in read_bundled_passages() for word in passage.text.lower().split()})
    generator = random.Random(seed)
    return [
        f"Document {index}: {' '.join(generator.choices(words, k=PASSAGE_WORDS))}." for index in range(count)
    ]


PASSAGES = make_passages(3, seed=7)
QUESTION = "Question: what do these documents have in common?"
SAVED_S = 120.0


@pytest.fixture
def client(service: ServiceUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, service: ServiceUnderTest, *order: int) -> Any:
    prompt = CHUNK_GAP.join([*(PASSAGES[number] for number in order), QUESTION])
    return client.chat.completions.create(
        model=service.model, messages=[{"role": "user", "content": prompt}], max_tokens=2, temperature=0
    )


def lengths_in_prompts(kintsugi: Client) -> set[int]:
    """Tokens of each passage with the blank line behind it, as a prompt holds them."""
    word, *longer = kintsugi.tokenize(["Question", *(f"{text}{CHUNK_GAP}Question" for text in PASSAGES)])
    return {len(text.token_ids) - len(word.token_ids) for text in longer}


def wait_until_saved(kintsugi: Client, lengths: set[int]) -> None:
    """By their lengths: what other clients sent may be saved here, too."""
    deadline_s = time.monotonic() + SAVED_S
    while missing := lengths - {chunk.num_tokens for chunk in kintsugi.list_chunks()}:
        assert time.monotonic() < deadline_s, f"no segments of {sorted(missing)} tokens were saved"
        time.sleep(0.2)


def test_passages_that_nobody_declared_are_hit_at_their_third_sight(
    service: ServiceUnderTest, client: openai.OpenAI
) -> None:
    with Client(service.grpc, namespace="default") as kintsugi:
        lengths = lengths_in_prompts(kintsugi)
        first = ask(client, service, 0, 1, 2).kv_transfer_params["kintsugi"]
        assert (first["segments_counted"], first["tokens_discovered"]) == (3, 0)
        assert ask(client, service, 1, 2, 0).kv_transfer_params["kintsugi"]["segments_queued"] == 3
        wait_until_saved(kintsugi, lengths)
    # Begins as neither did, so vLLM's prefix cache has none of its passages.
    answer = ask(client, service, 2, 0, 1)
    told = answer.kv_transfer_params["kintsugi"]
    assert (told["outcome"], told["tokens_discovered"]) == ("blended", sum(lengths))
    assert answer.usage.prompt_tokens_details.cached_tokens >= sum(lengths)


def test_passages_beside_a_put_document_are_hit_as_well(
    service: ServiceUnderTest, client: openai.OpenAI
) -> None:
    """None stands right before the document: a blank line at the end of a text may be other tokens than
    one within it."""
    document, first, second, new = make_passages(4, seed=8)

    def told(*texts: str) -> dict[str, Any]:
        content = "".join(f"{text}{CHUNK_GAP}" for text in texts) + QUESTION
        answer = client.chat.completions.create(
            model=service.model, messages=[{"role": "user", "content": content}], max_tokens=2, temperature=0
        )
        accounting: dict[str, Any] = answer.kv_transfer_params["kintsugi"]  # type: ignore[attr-defined]
        return accounting

    with Client(service.grpc, namespace="default") as kintsugi:
        kintsugi.put_chunks([document])
        stored = len(list(kintsugi.list_chunks()))
        assert told(document, first, second)["segments_counted"] == 2
        assert told(document, second, first)["segments_queued"] == 2
        wait_until(
            lambda: len(list(kintsugi.list_chunks())) >= stored + 2,
            "the passages beside the document were not saved",
            within_s=SAVED_S,
        )
    accounting = told(document, new, second, first)
    assert (accounting["outcome"], accounting["chunks_hit"]) == ("blended", 3)
    assert accounting["tokens_discovered"] >= 2 * 256

"""The local engine over real vLLM, without the connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.models.passages import read_bundled_passages
from tests.fakes.random_models.factory import make_checkpoint
from tests.fakes.random_models.shapes import find_shape

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    pytest.importorskip("vllm")
    folder: Path = make_checkpoint(find_shape("tiny-llama"), tmp_path_factory.mktemp("model"))
    with LocalEngine.start(folder, dtype="float32", kv_cache_memory_bytes=1 << 28) as engine:
        yield engine


def test_prompts_are_answered_together_as_alone(engine: LocalEngine) -> None:
    prompts = [
        Prompt(engine.tokenizer(passage.text).input_ids[: 200 + 40 * index], max_tokens=6, top_logprobs=2)
        for index, passage in enumerate(read_bundled_passages()[:3])
    ]
    together = engine.generate(prompts)
    engine.reset_prefix_cache()
    for prompt, batched in zip(prompts, together, strict=True):
        (alone,) = engine.generate([prompt])
        assert alone.token_ids == batched.token_ids
        assert alone.logprobs == pytest.approx(batched.logprobs, abs=1e-3)
        assert len(alone.token_ids) == len(alone.top_logprobs) == len(alone.itl_s) + 1 == 6
        assert alone.ttft_s > 0
        assert alone.finish_reason == "length"
        assert alone.accounting is None


def test_the_prefix_cache_can_be_reset(engine: LocalEngine) -> None:
    prompt = Prompt(engine.tokenizer(read_bundled_passages()[4].text).input_ids[:500], max_tokens=1)
    (cold,) = engine.generate([prompt])
    (warm,) = engine.generate([prompt])
    engine.reset_prefix_cache()
    (reset,) = engine.generate([prompt])
    assert (cold.num_cached_tokens, reset.num_cached_tokens) == (0, 0)
    assert warm.num_cached_tokens > 0

"""An engine of this process keeps the contract of all backends."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import psutil
import pytest

from kintsugi.core.exchange import EngineRequest
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import TokenIds
from kintsugi.engine.asynchronous import BIND, UNIPROC, AsyncEngine, AsyncSpec, arguments_for
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.checkpoint import tokenizer_digest
from tests.contracts.backend_contract import BackendContract, Engines
from tests.integration.serving.openai.conftest import Served

pytestmark = pytest.mark.engine

Result = TypeVar("Result")


class OneEngine(Engines):
    def __init__(self, served: Served) -> None:
        self._served = served
        self.backend = served.engine
        self.long_answer_tokens = served.info.max_model_len - 100

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._served.run(coroutine)

    async def idle(self) -> bool:
        """vLLM's own word: ours would be zero with the generator that was closed."""
        return bool(self._served.engine.client.get_num_unfinished_requests() == 0)

    async def closed(self) -> AsyncEngine:
        """Without its engine's process: the one that is served has to last."""
        return AsyncEngine.__new__(AsyncEngine)


class TestAsyncEngine(BackendContract):
    @pytest.fixture
    def engines(self, served: Served) -> OneEngine:
        return OneEngine(served)

    def test_plain_prompts_share_the_prefix_cache_within_a_namespace(self, engines: OneEngine) -> None:
        """Also where nothing is to be blended: else one tenant's times tell what another has asked."""
        prompt = TokenIds.of([0, *range(40, 400)])

        async def cached_tokens(namespace: str, number: int) -> int:
            params = KintsugiParams(namespace, op=Op.OFF)
            request = EngineRequest(f"plain-{number}", prompt, params, {"max_tokens": 1})
            async for delta in engines.backend.generate(request):
                last = delta
            assert last.usage is not None
            return last.usage.cached_tokens

        seen = [engines.run(cached_tokens(name, n)) for n, name in enumerate(("ours", "ours", "theirs"))]
        assert seen[0] == seen[2] == 0
        assert seen[1] > 0


def test_an_engine_names_the_tokenizer_that_its_gateway_reads(served: Served) -> None:
    assert served.info.tokenizer == tokenizer_digest(bundled_checkpoint()) != ""


def test_one_worker_lives_in_the_cores_process(served: Served) -> None:
    (core,) = served.engine.client.engine_core.resources.engine_manager.processes
    spawned = [
        child for child in psutil.Process(core.pid).children(recursive=True) if _is_spawned(child.cmdline())
    ]
    assert spawned == []


def _is_spawned(command: list[str]) -> bool:
    return any("spawn_main" in part for part in command)


@pytest.mark.parametrize(
    ("bind", "vllm_args", "executor"),
    [
        (None, {}, UNIPROC),
        (None, {"tensor_parallel_size": 1}, UNIPROC),
        (None, {"tensor_parallel_size": 2}, None),
        (None, {"distributed_executor_backend": "mp"}, "mp"),
        ("auto", {}, None),
    ],
)
def test_workers_that_are_several_or_bound_have_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, bind: str | None, vllm_args: dict[str, Any], executor: str | None
) -> None:
    monkeypatch.setenv(BIND, bind or "nobind")
    spec = AsyncSpec(str(bundled_checkpoint()), "m", "grpc://127.0.0.1:1", vllm_args=vllm_args)
    assert arguments_for(spec).get("distributed_executor_backend") == executor

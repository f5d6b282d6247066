from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.store.client.ram import RamStore
from tests.contracts.backend_contract import BackendContract, Engines
from tests.fakes.stub_backend import StubBackend, StubDelays

Result = TypeVar("Result")


class StubEngines(Engines):
    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.backend: StubBackend = StubBackend(StubDelays(token_s=0.05), store=RamStore(), max_model_len=512)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(coroutine)

    async def idle(self) -> bool:
        return self.backend.seen.running == 0

    async def closed(self) -> StubBackend:
        backend = StubBackend()
        await backend.close()
        return backend

    def close(self) -> None:
        self._runner.close()


class TestStub(BackendContract):
    @pytest.fixture
    def engines(self) -> Iterator[StubEngines]:
        engines = StubEngines()
        yield engines
        engines.close()

    def test_it_can_be_down(self, engines: StubEngines) -> None:
        engines.backend.down = True
        with pytest.raises(Unavailable):
            engines.run(engines.backend.info())
        with pytest.raises(Unavailable):
            engines.run(engines.answer(engines.request(engines.tokens(5))))

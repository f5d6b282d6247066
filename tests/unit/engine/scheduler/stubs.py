"""Stubs and requests of the tests of the scheduler's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from kintsugi.core.errors import Unavailable
from kintsugi.core.plan import BlendPlan, Selection, make_trial
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, Span
from kintsugi.fusor.control.controller import Planner, PlanRequest
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import Found

BLOCK = 16
PROMPT = list(range(100))


class StubStore(RamStore):
    """Answers lookups as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.lookups = 0
        self.held: dict[ChunkKey, Found] = {}

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        self.lookups += 1
        if self.is_down:
            raise Unavailable("down")
        return [self.held.get(key) for key in keys] if self.held else super().find(namespace, keys)


@dataclass(frozen=True)
class BrokenPlanner(Planner):
    """A defect that nobody has thought of."""

    def plan(self, request: PlanRequest) -> BlendPlan:
        raise ZeroDivisionError("by the test")


def trial_of(name: str, selection: Selection) -> Any:
    params = KintsugiParams("acme", spans=(Span(0, 32), Span(32, 64)), trial=make_trial(selection))
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params.to_mapping()})
    return Request(name, PROMPT, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))

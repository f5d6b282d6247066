"""The start-up self-test passes on a sound engine and fails on each defect it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kintsugi.core.errors import SelfTestFailed
from kintsugi.engine.config import SELF_TEST_CHECKS
from kintsugi.engine.local import LocalEngine
from kintsugi.engine.worker import selftest, stack
from kintsugi.engine.worker.attention.scattered import ScatteredRows
from kintsugi.engine.worker.model import LoadedModel
from kintsugi.fusor import loader, staging
from kintsugi.fusor.codecs import decode_into
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.staging import ChunkRows
from tests.integration.engine.conftest import EngineSlot

pytestmark = pytest.mark.engine("tiny-llama")


@pytest.fixture(scope="module")
def model(engine_slot: EngineSlot) -> LoadedModel:
    engine: LocalEngine = engine_slot.get("tiny-llama")
    engine.reset_prefix_cache()
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    model: LoadedModel = connector._worker._model
    return model


def shifted_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = Rotary.rotate
    monkeypatch.setattr(Rotary, "rotate", lambda self, keys, at: rotate(self, keys, at + 1))


def keys_and_values_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(frame: Any, encoding: Any, rows: slice, key: torch.Tensor, value: torch.Tensor) -> None:
        decode_into(frame, encoding, rows, value, key)

    monkeypatch.setattr(staging, "decode_into", swapped)


def another_rope_base(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = Rotary.rotate

    def wrong(self: Rotary, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.cos.shape[1]
        inverse = 500.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(self.cos.shape[0]).float(), inverse)
        return rotate(Rotary(angles.cos(), angles.sin(), self.is_neox), keys, positions)

    monkeypatch.setattr(Rotary, "rotate", wrong)


def keys_not_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rotary, "rotate", lambda self, keys, at: keys.clone())


def rows_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    placements_of = loader.placements_of

    def moved(*arguments: Any) -> list[ChunkRows]:
        return [ChunkRows(p.manifest, p.first_row, p.positions.roll(1)) for p in placements_of(*arguments)]

    monkeypatch.setattr(selftest, "placements_of", moved)


def scattered_tokens_reading_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where there are more runs than prefix, chunk and question make: in vLLM's kernel, or in ours."""
    build, rows = stack._common_metadata, ScatteredRows

    def elsewhere(*arguments: Any) -> Any:
        common = build(*arguments)
        if common.num_reqs > 3:
            common.block_table_tensor = common.block_table_tensor + 20
        return common

    monkeypatch.setattr(stack, "_common_metadata", elsewhere)
    monkeypatch.setattr(stack, "ScatteredRows", lambda positions, table: rows(positions, table + 20))


def test_a_sound_engine_passes(model: LoadedModel) -> None:
    selftest.self_test(model)


def test_every_check_has_a_name_that_doctor_lists(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one, `names`, is the scheduler's."""
    ran: list[str] = []
    monkeypatch.setattr(selftest, "_check", lambda _model, name, *_given: ran.append(name))
    selftest.self_test(model)
    assert tuple(ran) == SELF_TEST_CHECKS[:-1]


@pytest.mark.parametrize(
    "damage",
    [
        shifted_by_one,
        keys_and_values_swapped,
        another_rope_base,
        keys_not_rotated,
        rows_in_the_wrong_place,
        scattered_tokens_reading_other_blocks,
    ],
)
def test_a_defect_fails(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, damage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    damage(monkeypatch)
    with pytest.raises(SelfTestFailed, match="relative error"):
        selftest.self_test(model)


@pytest.mark.engine("tiny-llama", ends=True)
@pytest.mark.parametrize("model_is_known", [True, False])
def test_after_a_failed_self_test_prompts_are_prefilled_in_full(
    engine_slot: EngineSlot, model_is_known: bool
) -> None:
    from tests.integration.engine.conftest import NAMESPACE, PREFIX, ask_cold, chunks_of, rag

    engine = engine_slot.get("tiny-llama")
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    worker = connector._worker
    chunks = chunks_of(50, 60, seed=9)
    engine.save(PREFIX, chunks, NAMESPACE)
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    worker._unable = "self_test_failed: check 'own prefix'"
    if not model_is_known:
        worker._model = None
    try:
        for outcome in ("failed", "declined"):
            answer = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
            assert answer.accounting is not None
            assert answer.accounting["outcome"] == outcome
            assert answer.accounting["reason"].startswith("self_test_failed")
            assert answer.token_ids == full.token_ids
    finally:
        engine_slot.close()

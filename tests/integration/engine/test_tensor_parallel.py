"""Two ranks: each loads its own heads, they select alike, and they restart together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.accounting import ChunkAudit
from kintsugi.core.layout import ELEMENT_BYTES
from kintsugi.core.request import SelectorName
from kintsugi.fusor.audit import find_damage
from tests.conftest import Figure, Supports
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.fakes.random_models.shapes import TINY_SHAPES
from tests.integration.engine.conftest import PREFIX, chunks_of, engine_dtype, rag
from tests.integration.engine.tensor_parallel import ATTENDING, QUERY_LAYERS, SIZES
from tests.oracle import Oracle

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[3]
START_AND_CHECK_TIMEOUT_S = 280


@pytest.fixture(
    scope="module",
    params=[
        shape if shape == "tiny-llama" else pytest.param(shape, marks=pytest.mark.full)
        for shape in sorted(TINY_SHAPES)
    ],
)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seen(shape: str) -> dict[str, Any]:
    """What two workers of one engine did; in a process of its own, as vLLM keeps connectors by process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.engine.tensor_parallel", shape],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_AND_CHECK_TIMEOUT_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def test_chunks_are_saved_once(seen: dict[str, Any]) -> None:
    assert [accounting["outcome"] for accounting in seen["saved"]] == ["saved"] * len(SIZES)


@pytest.mark.parametrize("check", ["full ratio", "own prefix", "gaps"])
def test_what_is_exact_is_exact(
    seen: dict[str, Any], shape: str, check: str, supports: Supports, figure: Figure
) -> None:
    got = seen[check]
    assert got["accounting"]["outcome"] == "blended", got
    assert got["same_tokens"]
    figure("r1_max_abs_dlogprob", f"{shape}, TP = 2", got["max_abs_dlogprob"])
    assert got["max_abs_dlogprob"] <= 0.01
    supports(shape, "TP", "exact")


def test_each_rank_loads_its_own_heads(seen: dict[str, Any], shape: str) -> None:
    """Together they load every byte once."""
    dims = TINY_SHAPES[shape]
    row = dims.layers * 2 * dims.kv_heads * dims.head_dim * ELEMENT_BYTES[engine_dtype()]
    for check in ("full ratio", "ratio .15", "ratio 0"):
        assert seen[check]["accounting"]["bytes_loaded"] == sum(SIZES) * row


def test_less_than_everything_is_recomputed(seen: dict[str, Any]) -> None:
    """Else the exact checks would compare full prefill with itself. The first chunk is exact as loaded."""
    assert seen["ratio 0"]["accounting"]["tokens_recomputed"] == 0
    assert seen["ratio .15"]["accounting"]["tokens_recomputed"] == round(0.15 * sum(SIZES[1:]))
    assert seen["ratio 0"]["max_abs_dlogprob"] > 0.1


@pytest.mark.parametrize("selector", ATTENDING)
def test_ranks_put_their_attention_together(seen: dict[str, Any], shape: str, selector: SelectorName) -> None:
    accounting = seen[selector.value]["accounting"]
    assert accounting["outcome"] == "blended", accounting
    assert accounting["tokens_recomputed"] == round(0.15 * sum(SIZES[1:]))
    if selector is not SelectorName.QUERY:
        return
    prompt = rag(*chunks_of(*SIZES, seed=3))
    oracle = Oracle(make_checkpoint_once(shape))
    attended = oracle.attended(
        prompt.token_ids, PREFIX, [(s.start, s.end) for s in prompt.spans], QUERY_LAYERS
    )
    attended[: prompt.spans[0].end] = 0  # exact as loaded: no candidates
    best = set(attended.topk(accounting["tokens_recomputed"]).indices.tolist())
    chosen = {*accounting["recomputed_positions"]["0"]}
    # The oracle computes in float32; one rank's heads alone agree on about half.
    assert len(chosen & best) >= 0.9 * len(best)


def test_a_chunk_lost_on_one_rank_restarts_all(seen: dict[str, Any]) -> None:
    got = seen["lost on one rank"]
    assert got["accounting"]["outcome"] == "blended", got
    assert got["accounting"]["restarts"] == 1
    assert seen["after the loss"]["chunks_missed"] == 1
    assert got["same_tokens"]
    assert got["max_abs_dlogprob"] <= 0.01


def test_memory_that_runs_out_on_one_rank_costs_one_pass(seen: dict[str, Any]) -> None:
    """The rank goes on with zeros, so that the others do not wait for it, and all give the pass up."""
    got = seen["out of memory on one rank"]
    for where in ("failed", "between"):
        assert got[where]["accounting"]["outcome"] == "failed", got
        assert got[where]["same_tokens"]
        assert got[where]["max_abs_dlogprob"] <= 0.01
    assert got["blended"]["outcome"] == "blended"
    assert [accounting["outcome"] for accounting in got["saves"]] == ["failed", "saved"]


def test_an_audit_compares_the_heads_of_all_ranks(seen: dict[str, Any]) -> None:
    *sound, damaged = seen["audits"]
    assert [accounting["outcome"] for accounting in seen["audits"]] == ["audited"] * 3
    assert [find_damage(ChunkAudit(**accounting["audit"])) for accounting in sound] == [None, None]
    damage = find_damage(ChunkAudit(**damaged["audit"]))
    assert damage is not None, damaged


def test_weights_that_changed_on_one_rank_stop_all(seen: dict[str, Any]) -> None:
    first, later = seen["weights changed on one rank"]
    assert (first["outcome"], later["outcome"]) == ("failed", "declined")
    for accounting in (first, later):
        assert accounting["reason"].startswith("weights_changed: ")


def test_the_engine_serves_on(seen: dict[str, Any]) -> None:
    assert seen["nothing left behind"]["same_tokens"]

"""The GPU benchmark cannot run here, but what it compares can be compared on a CPU at a small size."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.gpu import scattered_attention as benchmark
from kintsugi.fusor.attention import attend_scattered


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_ways_are_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmark.SHAPES, "tiny", (4, 2, 16))
    layer = benchmark.layer_of("tiny", 64, "cpu")
    assert len(layer.positions) == 9
    expected = attend_scattered(
        layer.query, layer.key_cache, layer.value_cache, layer.block_table, layer.positions, scale=layer.scale
    )
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for way in ("dense_sdpa", "flex_attention"):
        assert torch.allclose(benchmark.WAYS[way](layer)().float(), expected.float(), atol=3e-2), way


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scattered_attention"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="CUDA"):
        benchmark.main()

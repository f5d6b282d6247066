"""The GPU's benchmark of an engine, without one: what it asks, and what it says of the answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import engine_ttft
from benchmarks.gpu.blending import MAIN_SELECTIONS
from kintsugi.engine import plugin
from kintsugi.engine.local import Prompt


class Engine:
    """Answers in 8 ms, blends in 2 ms, and declines `query`."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.asked = 0
        self.stored: set[int] = set()

    def answer(self, prompt: Prompt) -> Any:
        self.asked += 1
        assert len(prompt.token_ids) + prompt.max_tokens <= self.max_model_len
        if prompt.params is None:
            return SimpleNamespace(ttft_s=0.008, accounting=None)
        spans = prompt.params.spans
        assert spans is not None
        assert spans[-1].end in self.stored
        declined = prompt.params.selector == "query"
        outcome = {"outcome": "declined", "reason": "device_memory"} if declined else {"outcome": "blended"}
        return SimpleNamespace(ttft_s=0.002, accounting={**outcome, "cost": 0.2})


def test_every_selection_is_compared_with_full_prefill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = []

    @contextlib.contextmanager
    def start(shape: str, layers: int, **options: Any) -> Iterator[Engine]:
        assert (shape, layers) == ("mistral-7b-layers", 16)
        engines.append(Engine(**options))
        yield engines[0]

    monkeypatch.setattr(engine_ttft, "engine", start)
    monkeypatch.setattr(engine_ttft, "cold", lambda running, prompt: running.answer(prompt))
    monkeypatch.setattr(
        engine_ttft, "store_chunks", lambda running, prompt: running.stored.add(prompt.spans[-1].end)
    )
    monkeypatch.setattr(plugin, "register", lambda: None)
    monkeypatch.setattr("sys.argv", ["engine_ttft", "--contexts", "1000", "2000", "--repeats", "2"])
    engine_ttft.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert engines[0].asked == 2 * 3 * 5
    assert [row["selection"] for row in rows] == 2 * list(MAIN_SELECTIONS)
    assert [round(row["context"], -2) for row in rows] == 4 * [1000] + 4 * [2000]
    assert {row["speedup"] for row in rows} == {4.0}
    assert [row["holds"] for row in rows[:4]] == [True, False, True, True]
    assert (rows[1]["reason"], rows[1]["outcome"]) == ("device_memory", "declined")
    assert rows[0]["layers"] == 16

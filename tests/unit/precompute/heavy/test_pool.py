"""How a job comes to its Ray."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="install the extra `precompute`")
pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")

import ray

from kintsugi.core.errors import Unavailable
from kintsugi.precompute.pool import ensure_ray


@pytest.mark.parametrize(
    ("address", "failure", "word"),
    [
        ("10.0.0.9:6379", ConnectionError("ray.init() timed out"), "RAY_ADDRESS=10.0.0.9:6379"),
        ("nowhere", ValueError("malformed address"), "RAY_ADDRESS=nowhere"),
        ("", RuntimeError("Timed out waiting for file"), "does not start here"),
    ],
)
def test_a_ray_that_is_not_there_is_explained(
    monkeypatch: pytest.MonkeyPatch, address: str, failure: Exception, word: str
) -> None:
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        asked.append(options)
        raise failure

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Unavailable, match=word):
        ensure_ray(workers=1)
    assert [options.get("address") for options in asked] == [None if address else "local"]

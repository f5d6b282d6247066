"""The engine's correctness matrix on a CUDA device: the very tests of `tests/integration/engine`.

vLLM takes the device that it finds, so on a machine with a GPU these names run there. Exactness is bitwise
only where the backend's kernels do not depend on the batch; the bounds are the same.
"""

from __future__ import annotations

import pytest
import torch

from kintsugi.fusor.attention import attend_scattered

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("the engine on a GPU: no CUDA device here", allow_module_level=True)

from kintsugi.engine import plugin  # noqa: E402
from kintsugi.engine.local import LocalEngine  # noqa: E402
from kintsugi.engine.worker import selftest  # noqa: E402
from kintsugi.engine.worker.attention import scattered  # noqa: E402
from tests.integration.engine.test_architectures import (  # noqa: E402
    engine,
    float32_engine,
    oracle,
    shape,
    test_any_ratio_is_what_the_oracle_says,
    test_chunked_prefill,
    test_exact_prefixes_are_found_and_never_poisoned,
    test_full_ratio_is_full_prefill,
    test_one_chunk_behind_its_own_prefix_needs_no_recomputing,
    test_torch_compile,
)

__all__ = [
    "engine",
    "float32_engine",
    "oracle",
    "shape",
    "test_any_ratio_is_what_the_oracle_says",
    "test_chunked_prefill",
    "test_exact_prefixes_are_found_and_never_poisoned",
    "test_full_ratio_is_full_prefill",
    "test_one_chunk_behind_its_own_prefix_needs_no_recomputing",
    "test_torch_compile",
]

# vLLM calls it where Kintsugi is installed; `make gpu` needs its sources alone.
plugin.register()


def test_the_self_test_reaches_our_kernel(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    calls: list[int] = []

    def counted(query: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        calls.append(len(query))
        return attend_scattered(query, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(scattered, "attend_scattered", counted)
    monkeypatch.setattr(selftest, "_run_kernels", lambda _model: None)
    connector: object = get_kv_transfer_group()
    selftest.self_test(connector._worker._model)  # type: ignore[attr-defined]
    assert calls

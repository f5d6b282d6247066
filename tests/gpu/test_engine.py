"""The engine's correctness matrix on a CUDA device: the very tests of `tests/integration/engine`.

vLLM takes the device that it finds, so on a machine with a GPU these names run there. Exactness is bitwise
only where the backend's kernels do not depend on the batch; the bounds are the same.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("the engine on a GPU: no CUDA device here", allow_module_level=True)

from tests.integration.engine.test_architectures import (  # noqa: E402
    engine,
    shape,
    test_chunked_prefill,
    test_exact_prefixes_are_found_and_never_poisoned,
    test_full_ratio_is_full_prefill,
    test_one_chunk_behind_its_own_prefix_needs_no_recomputing,
)

__all__ = [
    "engine",
    "shape",
    "test_chunked_prefill",
    "test_exact_prefixes_are_found_and_never_poisoned",
    "test_full_ratio_is_full_prefill",
    "test_one_chunk_behind_its_own_prefix_needs_no_recomputing",
]

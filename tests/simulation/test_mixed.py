"""Random mixes on one engine: answers like solo runs, no block leaked, nothing hangs."""

from __future__ import annotations

import pytest

from tests.integration.engine.conftest import EngineSlot
from tests.simulation.mixed import MixReport, run_mixes

pytestmark = [
    pytest.mark.engine,
    pytest.mark.simulation,
    # Some faults are errors that no store may raise: the loader's thread reports them and dies of them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def assert_clean(report: MixReport) -> None:
    assert report.errors == 0, f"seed {report.seed}, mix {report.mixes - 1} or before: {report}"
    assert report.answers > 0


@pytest.mark.engine("tiny-llama float32")
def test_a_few_mixes(engine_slot: EngineSlot) -> None:
    """float32, so that nothing can hide behind rounding."""
    report = run_mixes(engine_slot.get("tiny-llama", dtype="float32"), seed=1, count=10)
    assert_clean(report)
    assert report.ties == 0
    assert report.max_abs_dlogprob <= 1e-3


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gemma3"])
def test_many_mixes(engine_slot: EngineSlot, shape: str, dtype: str) -> None:
    report = run_mixes(engine_slot.get(shape, dtype=dtype), seed=2, count=200)
    assert_clean(report)

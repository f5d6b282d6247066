"""The versions of vLLM with which Kintsugi blends. Error messages and the documentation name them.

Whether the installed vLLM blends depends on its names and signatures (`engine.worker.hooks`), not on its
version: this table only records what is known of each version.
"""

from __future__ import annotations

RUN = ("0.31", "0.32")
"""Versions on which the engine's tests pass."""
PROBED = ("0.30", "0.33")
"""Versions whose sources have every name and signature that blending needs, without a test run."""
LACKING = ("0.26",)
"""Versions whose sources lack some of the names, so that nothing is blended."""
REQUIREMENT = ">=0.31,<0.33"
"""Requirement of the extra `gpu`: the versions of `RUN`."""

WORKING = (
    f"vLLM {' and '.join(RUN)} are tested, {' and '.join(PROBED)} have everything that blending needs: "
    f"install 'vllm{REQUIREMENT}'"
)
"""Clause for messages."""


def is_tested(version: str) -> bool:
    """Whether the engine's tests pass on vLLM `version`, such as `0.32.0`."""
    return version.startswith(tuple(f"{minor}." for minor in RUN))

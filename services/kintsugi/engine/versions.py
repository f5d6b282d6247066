"""Which versions of vLLM blend, in words that every refusal and the documentation share.

Whether the installed vLLM blends is decided by its names and signatures (`engine.worker.hooks`), not by its
version: this table only says what was found out about each.
"""

from __future__ import annotations

RUN = ("0.31", "0.32")
"""The engine's tests pass on these."""
PROBED = ("0.30", "0.33")
"""Their sources have every name and signature that blending needs; no tests of ours run on them."""
LACKING = ("0.26",)
"""Their sources lack some, so an engine of theirs blends nothing."""
REQUIREMENT = ">=0.30,<0.34"
"""What the extra `gpu` asks for."""

WORKING = (
    f"vLLM {' and '.join(RUN)} are tested, {' and '.join(PROBED)} have everything that blending needs: "
    f"install 'vllm{REQUIREMENT}'"
)
"""One clause for messages."""


def is_tested(version: str) -> bool:
    """Whether the engine's tests pass on vLLM `version`, such as `0.32.0`."""
    return version.startswith(tuple(f"{minor}." for minor in RUN))

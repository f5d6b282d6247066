"""Makes a named model ready before a command uses it."""

from __future__ import annotations

from kintsugi.cli.screen import Screen
from kintsugi.models.reference import REFERENCE, fetch_model, is_reference


def prepare_model(screen: Screen, model: str) -> None:
    """Fetch the reference model if `model` names it and it is not cached yet, and show the progress.

    Raises as `fetch_model` does.
    """
    if is_reference(model) and not REFERENCE.is_cached:
        with screen.step(f"Fetching {REFERENCE.title} (only once)") as say:
            fetch_model(REFERENCE, say)

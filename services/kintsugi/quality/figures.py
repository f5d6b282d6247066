"""Matplotlib helpers: create a figure with our look, and save it. Matplotlib is imported on first use."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, Unavailable

FORMATS = ("svg", "png")
SIZE_INCHES = (7.0, 4.4)


def prepare_folder(folder: Path) -> None:
    """Create the folder for plots; call it before a long measurement. Raises `Unavailable` if matplotlib is
    not installed, `InvalidField` if the folder cannot be created."""
    if find_spec("matplotlib") is None:
        raise Unavailable("plots need matplotlib; install kintsugi-kv[plots], or run without plots")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField(
            "plots", f"{folder} cannot be created ({error.strerror}); name another folder"
        ) from error


def create_figure() -> tuple[Any, Any]:
    """Create a figure and its axes; they need no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def save_figure(path: Path, figure: Any) -> list[Path]:
    """Write the figure in each of `FORMATS`, replacing the path's suffix. Returns the paths."""
    paths = [path.with_suffix(f".{suffix}") for suffix in FORMATS]
    for target in paths:
        figure.savefig(target, dpi=150)
    return paths

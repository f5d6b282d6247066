"""The style and files of all plots. Matplotlib is imported when one is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, Unavailable

FORMATS = ("svg", "png")
SIZE_INCHES = (7.0, 4.4)


def prepare(folder: Path) -> None:
    """Create the folder. Call it before a long measurement: raises `Unavailable` without matplotlib and
    `InvalidField` if the folder cannot be created."""
    if find_spec("matplotlib") is None:
        raise Unavailable("plots need matplotlib; install kintsugi-kv[plots], or omit the plots")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField("plots", f"{folder} cannot be created ({error.strerror}); name another") from error


def figure_and_axes() -> tuple[Any, Any]:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def save(path: Path, figure: Any) -> list[Path]:
    """Write the figure in each of `FORMATS`, replacing the path's suffix; returns the paths."""
    paths = [path.with_suffix(f".{suffix}") for suffix in FORMATS]
    for one in paths:
        figure.savefig(one, dpi=150)
    return paths

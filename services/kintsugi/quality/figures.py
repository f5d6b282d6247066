"""How pictures look and where they are kept, whatever they show. Matplotlib is imported when one is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, Unavailable

FORMATS = ("svg", "png")
SIZE_INCHES = (7.0, 4.4)


def prepare(folder: Path) -> None:
    """Make the folder. Whoever measures for long asks before: raises `Unavailable` where plots cannot be
    drawn here, `InvalidField` where the folder cannot be made."""
    if find_spec("matplotlib") is None:
        raise Unavailable("plots need matplotlib; install kintsugi-kv[plots], or ask for none")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField("plots", f"{folder} cannot be made ({error.strerror}); name a folder") from error


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
    """Write it in each of `FORMATS`, the path's suffix replaced; where."""
    paths = [path.with_suffix(f".{suffix}") for suffix in FORMATS]
    for one in paths:
        figure.savefig(one, dpi=150)
    return paths

"""Pictures of tables, with matplotlib, which is an extra: `pip install 'jaxring[plot]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxring import errors
from jaxring.cli import files


@dataclass(frozen=True)
class Panel:
    """One picture: a line for each name through its (x, y) points, x being a power of two or so."""

    points: Mapping[str, Sequence[tuple[float, float]]]
    y: str  # label
    log_y: bool = True


def lines(
    path: Path,
    points: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    log_y: bool,
) -> None:
    """Writes one panel to a file."""
    panels(path, [Panel(points, y, log_y)], title=title, x=x)


def panels(path: Path, parts: Sequence[Panel], *, title: str, x: str) -> None:
    """Writes panels side by side to a file, whose ending says the format."""
    figure = require_matplotlib()(figsize=(7 * len(parts), 4.5), layout="constrained")
    figure.suptitle(title)
    for number, part in enumerate(parts):
        _draw(figure.add_subplot(1, len(parts), number + 1), part, x)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:  # no such folder; no such format
        raise errors.UsageError(f"--plot: {path} cannot be written: {e}") from None


def require(path: Path) -> None:
    """UsageError if a picture cannot be written there. Asked before a long measurement."""
    formats = require_matplotlib()().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        raise errors.UsageError(
            f"--plot: expected a name that ends in .png, .svg or .pdf, got {str(path)!r}"
        )
    files.require_writable("--plot", path)


def require_matplotlib() -> Any:
    """matplotlib's Figure; UsageError where it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise errors.UsageError(
            "--plot needs matplotlib; install it with: pip install 'jaxring[plot]'"
        ) from None
    return Figure


def _draw(axes: Any, part: Panel, x: str) -> None:
    for name, values in part.points.items():
        axes.plot(*zip(*values, strict=True), marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    if part.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=x, ylabel=part.y)
    axes.grid(alpha=0.3)
    axes.legend()

"""What every collective's call carries besides operands and ranks: algorithm, name, settings."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from typing import Any

from jaxring._src import primitive
from jaxring._src.settings import parse_selection
from jaxring.config import config
from jaxring.errors import UsageError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_warned: set[tuple[str, int, str]] = set()


@dataclasses.dataclass(frozen=True)
class How:
    """How a call is carried out. A static parameter of every primitive.

    Attributes:
      algorithm: a name, or a table by message size as the setting `algorithm` has it.
      name: the user's name of the call, or "".
      deterministic, chunk_bytes: the settings of these names.
      fallback: whether lax serves the call on a platform without a backend.
    """

    algorithm: str = "auto"
    name: str = ""
    deterministic: bool = False
    chunk_bytes: int = 0
    fallback: bool = False

    def algorithm_for(self, size_bytes: int) -> str:
        """The algorithm's name for a message of this size."""
        for name, low, high in parse_selection(self.algorithm):
            if low <= size_bytes <= high:
                return name
        return "auto"


def describe(collective: str, name: str | None) -> str:
    """How errors call the call: ``jaxring.allreduce 'gradients'``."""
    return f"jaxring.{collective}" + (f" {name!r}" if name else "")


def how(algorithm: str, name: str | None, call: str) -> How:
    """Checks the algorithm's name against the native list and takes the trace-time settings.

    Raises:
      UsageError: an unknown algorithm, or under `deterministic` one that does not sum in rank
        order.
    """
    entries = primitive.lists()["algorithms"]
    known = [entry["name"] for entry in entries]
    selection = config.algorithm if algorithm == "auto" else algorithm
    chosen = [selection] if algorithm != "auto" else [n for n, _, _ in parse_selection(selection)]
    for unknown in (n for n in chosen if n not in known):
        raise UsageError(f"{call}: unknown algorithm {unknown!r}; use {one_of(known)}")
    if config.deterministic:
        rank_order = [e["name"] for e in entries if e["rank_order"] and e["name"] != "auto"]
        for other in (n for n in chosen if n not in rank_order and n != "auto"):
            raise UsageError(
                f"{call}: algorithm {other!r} does not sum in rank order, which deterministic=True"
                f" asks for; use {one_of(['auto', *rank_order])}"
            )
    return How(
        selection, name or "", config.deterministic, config.chunk_bytes, config.fallback == "lax"
    )


def one_of(names: Any) -> str:
    """Text such as "sum, mean or max"."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def warn_once(text: str) -> None:
    """Warns at the user's line, once for each line and text.

    Not left to Python's own once-per-line rule, because tracing the same line again is not news and
    test runners switch that rule off.
    """
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    site = (frame.f_code.co_filename, frame.f_lineno, text)
    if site not in _warned:
        warnings.warn(text, UserWarning, stacklevel=depth)
        _warned.add(site)

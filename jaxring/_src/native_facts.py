"""What the native module says about itself and this machine; nothing here knows JAX."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
from typing import Any

try:
    from jaxring import _native
except ImportError as e:
    missing = importlib.util.find_spec("jaxring._native") is None
    raise ImportError(
        f"jaxring's native module {'is missing' if missing else 'cannot be loaded'} for Python "
        f"{platform.python_version()} in {os.path.dirname(os.path.dirname(__file__))}"
        f"{'' if missing else f' ({e})'}; install jaxring with this Python (pip install .), or "
        "start Python elsewhere than in its source tree"
    ) from None


@functools.cache
def lists() -> dict[str, Any]:
    """The native lists of collectives, ops, dtypes and algorithms."""
    return _native.lists()


@functools.cache
def algorithm_names() -> tuple[str, ...]:
    """All names that `algorithm=` takes, "auto" first."""
    return tuple(entry["name"] for entry in lists()["algorithms"])


def cache_line_round_trip_ns() -> float:
    """Nanoseconds in which two cores hand a cache line to and fro; 0 with one core. About 100 on
    one socket, 400 in the slow mode that virtual machines fall into."""
    return _native.cache_line_round_trip_ns()


def schedule(**call: Any) -> list[list[tuple[int, list[int], list[int], int, int, bool]]]:
    """A schedule as it would run: by rank its steps, as (channel, from, to, first element,
    elements, is a sum). It takes collective, algorithm, world_size, ranks_per_host, count and
    chunk_elements."""
    return _native.schedule(**call)


def simulate(**call: Any) -> dict[str, Any]:
    """A schedule on a clock; `jaxring simulate` says what it takes and gives."""
    return _native.simulate(**call)

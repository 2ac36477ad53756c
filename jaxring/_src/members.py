"""Which process each rank of a communicator is, for errors that the engine raises about a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Also of closed communicators, whose errors may be looked at later; the oldest are forgotten.
_KEPT = 256
_processes: dict[str, Sequence[Mapping[str, Any]]] = {}


def note(key: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The communicator `key` has these ranks: bootstrap.host_identity by rank."""
    _processes.pop(key, None)
    _processes[key] = rows
    while len(_processes) > _KEPT:
        del _processes[next(iter(_processes))]


def placed(message: str, details: Mapping[str, Any] | None) -> dict[str, Any]:
    """`details` of an error with this message, with the process of its rank where that is known.

    The rank is the first missing one where the engine names none."""
    found = dict(details or {})
    if found.get("rank") is None and found.get("missing_ranks"):
        found["rank"] = found["missing_ranks"][0]
    if (rank := found.get("rank")) is None:
        return found
    rows = _processes.get(_communicator_in(message), ())
    if rank < len(rows):
        for name in ("host", "pid"):
            if found.get(name) is None:
                found[name] = rows[rank][name]
    return found


def _communicator_in(message: str) -> str:
    """The key in "… on communicator world, …"; the longest, as keys may begin with one another."""
    keys = (k for k in _processes for end in ",: " if f"communicator {k}{end}" in message)
    return max(keys, key=len, default="")

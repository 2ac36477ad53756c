"""Puts the files of the setting `timeline` together, with one clock.

    merged = jaxring.timeline.merge(["trace.0.json", "trace.1.json"])

`jaxring timeline merge trace.*.json -o trace.json` does it from a shell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxring._src.timeline_writer import CLOCK
from jaxring.errors import UsageError

__all__ = ["merge"]

# In these every rank's part is needed by every other one, so that no rank can be through before the
# last one has come: what clocks of several hosts are held to.
_EVERYBODY = ("allreduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

Event = dict[str, Any]
Interval = tuple[float, float]  # microseconds


@dataclass
class _File:
    path: Path
    clock: dict[str, Any]
    events: list[Event]
    shift_us: float = 0.0  # to be added to its times

    @property
    def name(self) -> str:
        return self.path.name


def merge(files: Iterable[str | os.PathLike[str]]) -> dict[str, Any]:
    """One trace from those of a job's processes, as a dict to be written as JSON.

    Processes of one boot of one machine have one clock (CLOCK_MONOTONIC). Those of other hosts are
    placed by the calendar time that each file records, and then moved as little as shows no rank
    through an operation before the last one had come to it.

    Returns: {"traceEvents": […], "displayTimeUnit": "ms", "clocks": how each file was moved}. Times
      begin at 0.

    Raises: UsageError if there is no file, one is no timeline of jaxring, or two are of one rank.
    """
    names = [files] if isinstance(files, str | os.PathLike) else files
    parts = [_read(Path(name)) for name in names]
    if not parts:
        raise UsageError("timeline: no file to merge; give those that JAXRING_TIMELINE has named")
    _require_each_once(parts)
    _align(parts)
    times = [e["ts"] + part.shift_us for part in parts for e in part.events if "ts" in e]
    first_us = min(times, default=0.0)
    events = []
    for number, part in enumerate(sorted(parts, key=lambda part: part.clock["rank"])):
        for event in part.events:
            event["pid"] = number
            if "ts" in event:
                event["ts"] += part.shift_us - first_us
        events.append(_named("process_sort_index", number, {"sort_index": number}))
        events += part.events
    clocks = {part.name: {**part.clock, "moved_us": part.shift_us - first_us} for part in parts}
    return {"traceEvents": events, "displayTimeUnit": "ms", "clocks": clocks}


def _named(name: str, pid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}


def _read(path: Path) -> _File:
    try:
        events = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise UsageError(f"timeline: {path} cannot be read as a trace: {e}") from None
    heads = [e for e in events if isinstance(e, dict) and e.get("name") == CLOCK]
    if not isinstance(events, list) or len(heads) != 1:
        raise UsageError(
            f"timeline: {path} is no file that the setting `timeline` has written; give those of"
            " single processes, such as trace.0.json"
        )
    return _File(path, heads[0]["args"], [e for e in events if e is not heads[0]])


def _require_each_once(parts: Sequence[_File]) -> None:
    by_rank: dict[int, _File] = {}
    for part in parts:
        other = by_rank.setdefault(part.clock["rank"], part)
        if other is not part:
            raise UsageError(
                f"timeline: {other.path} and {part.path} are both of rank {part.clock['rank']}; "
                "give the files of one run, one for each rank"
            )


def _align(parts: Sequence[_File]) -> None:
    """Finds each file's shift, to the calendar time of the first one's host."""
    placed: list[_File] = []
    by_boot: dict[str, list[_File]] = {}
    for part in parts:
        by_boot.setdefault(part.clock["boot_id"], []).append(part)
    for group in by_boot.values():
        shift_us = group[0].clock["realtime_minus_monotonic_ns"] / 1e3
        for part in group:
            part.shift_us = shift_us
        low, high = _bounds(_operations(placed), _operations(group))
        for part in group:
            # A calendar clock that contradicts no operation is left as it is.
            part.shift_us += min(max(0.0, low), high) if low <= high else (low + high) / 2
        placed += group


def _operations(parts: Iterable[_File]) -> dict[tuple[Any, ...], list[Interval]]:
    """(first begin, last end) of each rank's part in each operation that needs everybody."""
    found: dict[tuple[Any, ...], dict[tuple[str, int], list[float]]] = {}
    for part in parts:
        for event in part.events:
            args = event.get("args", {})
            if event["ph"] != "X" or args.get("outcome") != "done":
                continue
            if not args["call"].startswith(_EVERYBODY):
                continue
            key = (args["communicator"], *args["operation"])
            begin_us = event["ts"] + part.shift_us
            times = found.setdefault(key, {}).setdefault((part.name, args["rank"]), [])
            times += [begin_us, begin_us + event["dur"]]
    return {
        key: [(min(times), max(times)) for times in of_ranks.values()]
        for key, of_ranks in found.items()
    }


def _bounds(
    placed: dict[tuple[Any, ...], list[Interval]], new: dict[tuple[Any, ...], list[Interval]]
) -> Interval:
    """(least, most) microseconds by which `new` may be moved: nobody ends before all have come."""
    low, high = float("-inf"), float("inf")
    for key in placed.keys() & new.keys():
        low = max(low, max(b for b, _ in placed[key]) - min(e for _, e in new[key]))
        high = min(high, min(e for _, e in placed[key]) - max(b for b, _ in new[key]))
    return low, high

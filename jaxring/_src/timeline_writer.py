"""What the setting `timeline` writes: one file of trace events for each process, for Perfetto or
chrome://tracing; `jaxring timeline merge` puts those of a job together (jaxring/timeline.py).

The engine collects operations as they end (xla_ffi/communicator/timeline.h); a thread fetches them
twice a second. A file is complete after each of these turns, so a killed process leaves a good one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from types import ModuleType
from typing import IO, Any

import jax.numpy as jnp

from jaxring._src import placement, threads

_TURN_S = 0.5
_STOP_S = 10.0
_END = "\n]\n"
# For chrome://tracing. Perfetto colours slices by their names, so all waits have one name.
WAIT = {"name": "waiting for ranks", "cname": "terrible"}
FAILED = "bad"
CLOCK = "jaxring_clock"  # the event that `jaxring timeline merge` aligns files by

_logger = logging.getLogger("jaxring")
_lock = threading.Lock()
_writer: Writer | None = None
rank_in_world: int | None = None  # of the last world that jaxring.init() joined


def follow(native: ModuleType, path: str) -> None:
    """The setting has changed: ends the file that is being written, and begins another one."""
    global _writer
    with _lock:
        if _writer is not None:
            _writer.stop()
        _writer = Writer(native, path) if path else None


def file_name(path: str, rank: int) -> str:
    """trace.json and rank 3 -> trace.3.json"""
    stem, extension = os.path.splitext(path)
    return f"{stem}.{rank}{extension}"


def payload_bytes(signature: str) -> int | None:
    """Bytes of one rank's operands, from a text such as "allreduce(sum, float32[2,3], …)"."""
    total = 0
    for dtype, shape in re.findall(r"\b([a-z]+[0-9a-z_]*)\[([0-9,]*)\]", signature):
        try:
            size = jnp.dtype(dtype).itemsize
        except TypeError:  # of a ppermute: perm=[…]
            continue
        for n in filter(None, shape.split(",")):
            size *= int(n)
        total += size
    return total or None


class Writer:
    """Writes one process's file until it is told to stop."""

    def __init__(self, native: ModuleType, path: str):
        self._native, self._path = native, path
        self._file: IO[bytes] | None = None
        self._rows = Rows()
        self._stop = threading.Event()
        self._turn = threading.Lock()
        native.timeline_rows()  # what an earlier one has left
        native.set_setting("timeline", 1)
        self._thread = threads.start(self._run, "jaxring-timeline")

    def stop(self) -> None:
        """Writes what is left."""
        self._native.set_setting("timeline", 0)
        self._stop.set()
        self._thread.join(_STOP_S)
        self._write_safely()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(_TURN_S):
            if not self._write_safely():
                return

    def _write_safely(self) -> bool:
        with self._turn:
            try:
                self._write()
                return True
            except OSError as e:
                self._native.set_setting("timeline", 0)
                _logger.warning("the timeline could not be written, so it ends here: %s", e)
                return False

    def _write(self) -> None:
        operations, dropped = self._native.timeline_rows()
        if not operations and not dropped:
            return
        file = self._file = self._file or self._begin()
        events = [event for one in operations for event in self._rows.events(one)]
        if dropped:
            # Instants belong to a process ("s": "p"), in the middle of whose time nobody knows.
            text = f"{dropped} operations were lost: they came faster than they could be written"
            last_us = operations[-1]["finished_ns"] / 1e3 if operations else 0
            pid = self._rows.pid
            events.append({"name": text, "ph": "i", "s": "p", "ts": last_us, "pid": pid, "tid": 0})
            _logger.warning("timeline: %s", text)
        # Over the end of the list, which is written again.
        file.seek(-len(_END), os.SEEK_END)
        text = "".join(",\n" + json.dumps(event) for event in events)
        file.write(text.encode() + _END.encode())
        file.flush()

    def _begin(self) -> IO[bytes]:
        rank = placement.discover().rank if rank_in_world is None else rank_in_world
        self._rows.pid = rank
        name = file_name(self._path, rank)
        file = open(name, "wb")  # noqa: SIM115 (as long as the process lives)
        _logger.info("the timeline goes to %s", name)
        head = {"ph": "M", "name": CLOCK, "pid": rank, "tid": 0, "args": clock(rank)}
        file.write(("[\n" + json.dumps(head) + _END).encode())
        return file


def clock(rank: int) -> dict[str, Any]:
    """Whose file this is, and how its times (CLOCK_MONOTONIC) become those of the calendar."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": boot,
        "realtime_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
    }


class Rows:
    """Which row an operation is shown in: one for each communicator, rank and channel, and more
    where operations overlap, as the slices of a row must not."""

    def __init__(self) -> None:
        self.pid = 0
        self._ends: dict[tuple[str, int], list[int]] = {}  # ns, by lane: its last slice's
        self._numbers: dict[tuple[str, int, int, int], int] = {}  # with lane and channel

    def events(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """The slices of an operation, and the name of its row if that is new."""
        events: list[dict[str, Any]] = []
        lane = self._lane(one)
        arrived, finished = one["arrived_ns"], one["finished_ns"]
        ready = one["ready_ns"] or finished  # 0: not all ranks had come when it failed
        label = one["name"] or one["collective"]
        args = {
            "call": f"{one['collective']} #{one['call']} of launch {one['launch']}",
            "operation": [one[k] for k in ("launch", "call", "copy", "iteration")],
            "communicator": one["communicator"],
            "rank": one["rank"],
            "algorithm": one["algorithm"],
            "bytes": payload_bytes(one["signature"]),
            "signature": one["signature"],
            "outcome": one["outcome"],
        }
        row = self._row(one, lane, 0, events)
        if ready > arrived:
            waits = {"for": label, **args}
            events.append(slice_of(WAIT, arrived, ready, self.pid, row, waits))
        style = {"name": label} if one["outcome"] == "done" else {"name": label, "cname": FAILED}
        for channel, end in enumerate(one["channel_ends_ns"] or [finished]):
            row = self._row(one, lane, channel, events)
            events.append(slice_of(style, ready, end, self.pid, row, args))
        return events

    def _lane(self, one: dict[str, Any]) -> int:
        # Operations come in the order of their ends.
        ends = self._ends.setdefault((one["communicator"], one["rank"]), [])
        for lane, end in enumerate(ends):
            if end <= one["arrived_ns"]:
                ends[lane] = one["finished_ns"]
                return lane
        ends.append(one["finished_ns"])
        return len(ends) - 1

    def _row(
        self, one: dict[str, Any], lane: int, channel: int, events: list[dict[str, Any]]
    ) -> int:
        key = (one["communicator"], one["rank"], lane, channel)
        if key not in self._numbers:
            if not self._numbers:
                host = f"rank {self.pid} ({socket.gethostname()}, pid {os.getpid()})"
                events.append(named("process_name", self.pid, 0, host))
            self._numbers[key] = number = len(self._numbers) + 1
            text = f"{shortened(key[0])} rank {key[1]}"
            text += f" channel {channel}" if channel else ""
            text += f" (at the same time: {lane + 1})" if lane else ""
            events.append(named("thread_name", self.pid, number, text))
        return self._numbers[key]


def shortened(communicator: str) -> str:
    return communicator if len(communicator) <= 30 else communicator[:27] + "…"


def named(what: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}}


def slice_of(
    style: dict[str, str], begin_ns: int, end_ns: int, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": begin_ns / 1e3, "dur": max(0, end_ns - begin_ns) / 1e3}
    return {**style, "ph": "X", "cat": "jaxring", **times, "pid": pid, "tid": tid, "args": args}

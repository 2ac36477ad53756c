"""How `jaxring bench` turns what the processes measured into rows and prints them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .bench_worker import Spec

Row = dict[str, Any]


def merge(lines: list[Row], spec: Spec) -> Row:
    """One row from what each process measured: the slowest process's median, all wrong elements."""
    times_us = {
        name: max(line["times_us"][name] for line in lines) for name in lines[0]["times_us"]
    }
    ours_us = times_us["jaxring"]
    algbw = lines[0]["size_bytes"] / (max(ours_us, 1e-3) * 1e3)  # bytes per ns = GB/s
    wrongs = [line["wrong"] for line in lines if line["wrong"] is not None]
    row = {
        **{
            key: lines[0][key]
            for key in ("size_bytes", "count", "algorithm", "transport", "calls", "slow_rounds")
        },
        "dtype": spec.dtype,
        "op": spec.op if spec.kind.reduces else "none",
        "time_us": ours_us,
        "spread_us": lines[0]["spread_us"],
        "algbw_GBps": algbw,
        "busbw_GBps": algbw * spec.kind.bus_factor(spec.ranks),
        "wrong": sum(wrongs) if wrongs else None,
    }
    if spec.against:
        row["against_us"] = times_us[spec.against]
        row["ratio"] = times_us[spec.against] / max(ours_us, 1e-3)
    if spec.algorithms:
        row["algorithms_us"] = {name: times_us[name] for name in spec.algorithms}
    return row


def columns(spec: Spec) -> list[tuple[str, int, Callable[[Row], str]]]:
    """(title, width, text of a row), from left to right."""
    result = [
        ("size(B)", 10, lambda r: str(r["size_bytes"])),
        ("count", 10, lambda r: str(r["count"])),
        ("type", 9, lambda r: r["dtype"]),
        ("redop", 6, lambda r: r["op"]),
        ("algorithm", 17, lambda r: r["algorithm"]),
        ("time(us)", 10, lambda r: f"{r['time_us']:.1f}"),
        ("algbw", 7, lambda r: f"{r['algbw_GBps']:.2f}"),
        ("busbw", 7, lambda r: f"{r['busbw_GBps']:.2f}"),
        ("#wrong", 7, lambda r: "N/A" if r["wrong"] is None else str(r["wrong"])),
    ]
    if spec.against:
        result += [
            (f"{spec.against}(us)", 10, lambda r: f"{r['against_us']:.1f}"),
            ("ratio", 7, lambda r: f"{r['ratio']:.2f}"),
        ]
    return result


class Follower(threading.Thread):
    """Prints a row as soon as every process has written its line of it."""

    def __init__(self, spec: Spec, on_row: Callable[[Row], None]):
        super().__init__(daemon=True)
        self.spec, self.on_row = spec, on_row
        self.rows: list[Row] = []
        self.finished = threading.Event()

    def run(self) -> None:
        while not self.finished.wait(0.2):
            self.poll()
        self.poll()

    def poll(self) -> None:
        paths = [Path(f"{self.spec.results}.{rank}") for rank in range(self.spec.processes)]
        if not all(path.exists() for path in paths):
            return
        texts = [path.read_text() for path in paths]
        complete = [text[: text.rfind("\n") + 1].splitlines() for text in texts]
        for lines in list(zip(*complete, strict=False))[len(self.rows) :]:
            row = merge([json.loads(line) for line in lines], self.spec)
            self.rows.append(row)
            self.on_row(row)

"""`jaxring bench --plot`: latency and bus bandwidth against message size, ours and the peer's."""

from __future__ import annotations

from pathlib import Path

from jaxring.cli import plots
from jaxring.cli.bench_table import Row
from jaxring.cli.bench_worker import Spec


def draw(rows: list[Row], spec: Spec, path: Path) -> None:
    """Two pictures in one file, both axes logarithmic."""
    factor = spec.kind.bus_factor(spec.ranks)

    def of(key: str) -> list[tuple[float, float]]:
        return [(row["size_bytes"], row[key]) for row in rows]

    def bandwidth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(size, size * factor / (us * 1e3)) for size, us in points]  # bytes per ns: GB/s

    times_us = {"jaxring": of("time_us")}
    if spec.against:
        times_us[spec.against] = of("against_us")
    panels = [plots.Panel(times_us, "time [µs]")]
    if factor > 0:  # a barrier moves nothing
        panels.append(
            plots.Panel(
                {name: bandwidth(points) for name, points in times_us.items()}, "busbw [GB/s]"
            )
        )
    title = f"{spec.collective}, {spec.ranks} ranks ({spec.processes} processes), {spec.dtype}"
    plots.panels(path, panels, title=title, x="bytes")

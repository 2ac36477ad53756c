"""`jaxring simulate`: how long each algorithm takes on machines that one does not have.

The engine's own schedules run on a clock (xla_ffi/algorithms/simulation.h): a message of b bytes
costs its link latency + b / bandwidth; ranks of a host share its network interface.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxring import errors
from jaxring._src import native_facts
from jaxring.cli import plots

ELEMENT_BYTES = 4  # of a float32, of which messages are made
HOPS_UP_TO = 1024  # ranks; counting hops costs as much as the simulation

HELP = """Time collectives on a model of a machine: which algorithm, and how training scales.

Examples:

  jaxring simulate --ranks 8,64,512 --per-host 8 --message 100M

  jaxring simulate --ranks 2..4096 --algorithm ring --algorithm tree --algorithm reducer

  jaxring simulate --ranks 4..512 --per-host 4 --message 178M --compute 556ms --overlap 0.42
  --between 5us,3.125GB/s --algorithm ring --plot scaling.png

Exit codes: 0; 2 if an option has no meaning.
"""

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Link:
    """Latency in seconds, bandwidth in bytes per second."""

    latency_s: float
    bytes_per_s: float

    def native(self) -> tuple[float, float]:
        return self.latency_s, 1 / self.bytes_per_s


@dataclass(frozen=True)
class Model:
    """What is simulated, and on what.

    Attributes:
      message_bytes: of one rank's operand.
      compute_s: of a training step without communication; 0: don't speak of training.
      overlap: the share of the communication that the computation hides.
    """

    collective: str
    message_bytes: int
    per_host: int
    within: Link
    between: Link
    reduce_bytes_per_s: float
    chunk_bytes: int
    compute_s: float = 0.0
    overlap: float = 0.0


def bytes_of(text: str) -> int:
    """Bytes: 4096, 178M, 1.5G (powers of 1000, as models and links are sold)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.strip().upper())
    count = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if count < ELEMENT_BYTES:
        raise typer.BadParameter(
            f"expected bytes such as 4096, 178M or 1.5G, at least {ELEMENT_BYTES}, got {text!r}"
        )
    return count


def seconds_of(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|ns)", text.strip())
    if match is None:
        raise typer.BadParameter(f"expected a time such as 5us, 20ms or 1.5s, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def rate_of(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])B/s", text.strip())
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"expected bytes per second such as 3.125GB/s, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def link_of(text: str) -> Link:
    latency, comma, rate = text.partition(",")
    if not comma:
        raise typer.BadParameter(f"expected latency,bandwidth such as 1us,10GB/s, got {text!r}")
    return Link(seconds_of(latency), rate_of(rate))


def ranks_of(text: str) -> tuple[int, ...]:
    """World sizes: "8,64,512", or "2..4096" for 2, 4, 8, …, 4096."""
    try:
        if ".." in text:
            first, last = (int(end) for end in text.split(".."))
            sizes = [first] if first <= last else []
            while sizes and sizes[-1] * 2 <= last:
                sizes.append(sizes[-1] * 2)
        else:
            sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > 1 << 14:
        raise typer.BadParameter(
            f"expected world sizes from 1 to 16384, as 8,64,512 or 2..4096, got {text!r}"
        )
    return tuple(sizes)


def run_one(model: Model, ranks: int, algorithm: str) -> dict[str, Any]:
    """The row of one world size and algorithm."""
    run = native_facts.simulate(
        collective=model.collective,
        algorithm=algorithm,
        world_size=ranks,
        ranks_per_host=model.per_host,
        count=model.message_bytes // ELEMENT_BYTES,
        element_bytes=ELEMENT_BYTES,
        wire_bytes=ELEMENT_BYTES,
        chunk_bytes=model.chunk_bytes,
        within=model.within.native(),
        between=model.between.native(),
        reduce_s_per_byte=1 / model.reduce_bytes_per_s,
        hops=ranks <= HOPS_UP_TO,
    )
    shown_s = (1 - model.overlap) * run["time_s"]
    efficiency = model.compute_s / (model.compute_s + shown_s) if model.compute_s else None
    hosts = -(-ranks // model.per_host)
    return {"ranks": ranks, "hosts": hosts, "algorithm": algorithm, **run, "efficiency": efficiency}


def table_of(rows: list[dict[str, Any]], model: Model) -> Table:
    title = f"{model.collective} of {model.message_bytes / 1e6:g} MB a rank"
    table = Table(title=title, title_justify="left")
    names = ["ranks", "hosts", "algorithm", "time", "hops", "sent by a rank", "sent by a host"]
    for name in names + (["efficiency"] if model.compute_s else []):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in rows:
        fastest = row["time_s"] == min(r["time_s"] for r in rows if r["ranks"] == row["ranks"])
        cells = [
            str(row["ranks"]),
            str(row["hosts"]),
            row["algorithm"],
            f"{row['time_s'] * 1e3:.4g} ms",
            str(row.get("hops", "")),
            f"{row['rank_bytes_sent'] / 1e6:.4g} MB",
            f"{row['host_bytes_sent'] / 1e6:.4g} MB",
        ]
        if model.compute_s:
            cells.append(f"{100 * row['efficiency']:.1f} %")
        table.add_row(*cells, style="bold" if fastest else None)
    return table


def simulate(
    ranks: Annotated[str, typer.Option(help="World sizes: 8,64,512 or 2..4096.")] = "2..512",
    per_host: Annotated[int, typer.Option(min=1, help="Ranks of a host.")] = 1,
    message: Annotated[str, typer.Option(help="Bytes of one rank's operand: 178M.")] = "100M",
    collective: Annotated[str, typer.Option(help="Which collective.")] = "allreduce",
    algorithm: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    within: Annotated[str, typer.Option(help="A host: latency,bandwidth.")] = "1us,10GB/s",
    between: Annotated[
        str, typer.Option(help="Hosts: latency,bandwidth of a host's interface.")
    ] = "10us,3.125GB/s",
    reduce_rate: Annotated[str, typer.Option(help="Bytes added per second.")] = "20GB/s",
    chunk: Annotated[str, typer.Option(help="Bytes of a chunk.")] = "262144",
    compute: Annotated[
        str | None, typer.Option(help="A training step without communication: 556ms.")
    ] = None,
    overlap: Annotated[
        float, typer.Option(min=0, max=1, help="Share of communication hidden by computation.")
    ] = 0.0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    if plot is not None:
        plots.require(plot)
    sizes = ranks_of(ranks)
    known = [
        a["name"] for a in native_facts.lists()["algorithms"] if collective in a["collectives"]
    ]
    known = [name for name in known if name != "auto"]
    if not known:
        some = ", ".join(native_facts.lists()["collectives"])
        raise errors.UsageError(f"simulate: {collective!r} is no collective; use one of {some}")
    for name in algorithm or ():
        if name not in known:
            raise errors.UsageError(
                f"simulate: {name!r} does not serve {collective}; known: {', '.join(known)}"
            )
    model = Model(
        collective=collective,
        message_bytes=bytes_of(message),
        per_host=per_host,
        within=link_of(within),
        between=link_of(between),
        reduce_bytes_per_s=rate_of(reduce_rate),
        chunk_bytes=bytes_of(chunk),
        compute_s=0.0 if compute is None else seconds_of(compute),
        overlap=overlap,
    )
    rows = run_all(model, sizes, algorithm or known)
    if as_json:
        print(json.dumps({"model": asdict(model), "rows": rows}, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 110).print(table_of(rows, model))
    if plot is not None:
        draw(rows, model, plot)


def run_all(model: Model, sizes: tuple[int, ...], algorithms: list[str]) -> list[dict[str, Any]]:
    rows = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating", total=len(sizes) * len(algorithms))
        for ranks in sizes:
            for name in algorithms:
                rows.append(run_one(model, ranks, name))
                progress.advance(task)
    return rows


def draw(rows: list[dict[str, Any]], model: Model, path: Path) -> None:
    """Efficiency, or without --compute the time, against ranks: one line for each algorithm."""
    what = "efficiency" if model.compute_s else "time_s"
    lines = {}
    for row in rows:
        lines.setdefault(row["algorithm"], []).append((row["ranks"], row[what]))
    plots.lines(
        path,
        lines,
        title=f"{model.collective} of {model.message_bytes / 1e6:g} MB, simulated",
        x="ranks",
        y="scaling efficiency" if model.compute_s else "time [s]",
        log_y=not model.compute_s,
    )

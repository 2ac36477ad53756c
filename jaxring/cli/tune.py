"""`jaxring tune`: times every algorithm by message size and writes the table that settings take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxring._src import native_facts

from . import files
from .bench import environment, measured
from .bench_mode import PatienceOption
from .bench_options import one_of, parse_size, sizes
from .bench_worker import Spec

TUNED = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
# A faster algorithm must beat "auto" by this much: less is noise, and every entry is one more thing
# that ranks have to have in common.
LEAST_GAIN = 1.1

HELP = """Measure which algorithm is fastest at which message size, here and now.

The file is for the setting `algorithm`, on every rank the same:

  jaxring tune -n 4 -o table.json

  JAXRING_ALGORITHM=table.json jaxring run -n 4 train.py

Exit codes: 0; 2 if an option has no meaning; that of a process that failed; 130 after Ctrl-C.
"""


def candidates(collective: str) -> tuple[str, ...]:
    """The algorithms that serve the collective, without "auto"."""
    entries = native_facts.lists()["algorithms"]
    return tuple(
        e["name"] for e in entries if collective in e["collectives"] and e["name"] != "auto"
    )


def best(row: dict[str, Any]) -> str:
    """The fastest algorithm of a row; "auto" unless another one is clearly faster."""
    times_us = row["algorithms_us"]
    fastest = min(times_us, key=times_us.__getitem__)
    return fastest if times_us[fastest] * LEAST_GAIN < row["time_us"] else "auto"


def selection(choices: list[tuple[int, str]]) -> str:
    """The setting's text from (message bytes, algorithm), ascending.

    An algorithm's range ends half way (as a ratio) to the next size, where another one is best.
    """
    parts: list[list[Any]] = []
    last_bytes = 0
    for size_bytes, name in choices:
        if not parts:
            parts.append([name, 0, "max"])
        elif parts[-1][0] != name:
            border = int((last_bytes * size_bytes) ** 0.5)
            parts[-1][2] = border
            parts.append([name, border + 1, "max"])
        last_bytes = size_bytes
    return ";".join(f"{name}:{low}-{high}" for name, low, high in parts)


def tune(
    collective: Annotated[
        str, typer.Argument(metavar="COLLECTIVE", help=f"One of {', '.join(TUNED)}.")
    ] = "allreduce",
    processes: Annotated[int, typer.Option("-n", min=1, help="Processes.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="CPU devices per process.")] = 1,
    begin: Annotated[str, typer.Option("-b", help="Smallest size in bytes.")] = "1K",
    end: Annotated[str, typer.Option("-e", help="Largest size in bytes.")] = "16M",
    factor: Annotated[int, typer.Option("-f", min=2, help="From size to size, times this.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each.")] = 10,
    patience_s: PatienceOption = 10,
    output: Annotated[
        Path, typer.Option("-o", help="The file to write, for the setting `algorithm`.")
    ] = Path("table.json"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the file's contents instead of a table.")
    ] = False,
) -> None:
    one_of("collective", collective, TUNED)
    if output.suffix != ".json":
        raise typer.BadParameter(f"-o: expected a name that ends in .json, got {str(output)!r}")
    files.require_writable("-o", output)
    spec = Spec(
        collective=collective,
        sizes_bytes=sizes(parse_size(begin), parse_size(end), factor),
        dtype="float32",
        op="sum",
        algorithm="auto",
        mode="mesh",
        processes=processes,
        devices=devices,
        against=None,
        warmup=5,
        rounds=rounds,
        check=False,
        results="",
        algorithms=candidates(collective),
        patience_s=patience_s,
    )
    # With --json the table that grows goes to stderr.
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 160)
    rows, state = measured(spec, console)
    table = selection([(row["size_bytes"], best(row)) for row in rows])
    document = {
        "algorithm": table,
        "collective": collective,
        "ranks": spec.ranks,
        "environment": environment() | state,
        "rows": rows,
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        print(json.dumps(document, indent=1))
        return
    console.print(f"algorithm = {table}", highlight=False, markup=False)


tune.__doc__ = HELP

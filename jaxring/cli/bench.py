"""`jaxring bench`: times a collective as nccl-tests does, ours and a peer's in the same processes.

The columns are nccl-tests' (size, count, type, redop, time, algbw, busbw, #wrong), with the
algorithm that really ran. busbw is algbw * 2 (n-1) / n for allreduce: what the hardware carried.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import typer
from rich.console import Console

from .bench_table import BUS_FACTORS, Follower, columns
from .bench_worker import FOLDS, LAX_OPS, Spec

PEERS = ("lax",)
MODES = ("mesh", "communicator")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
STOP_TIMEOUT_S = 10
INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it

HELP = """Time a collective with nccl-tests' columns, beside a peer in the same processes.

Examples:

  jaxring bench allreduce -n 2 -b 16 -e 64M -f 4 --against lax

  jaxring bench allreduce -n 1 --devices 4 -e 16M --against lax --json out.json

  jaxring bench allreduce -n 4 --mode communicator -d bfloat16 --algorithm ring
"""


def parse_size(text: str) -> int:
    """Bytes from nccl-tests' notation: 16, 4K, 64M, 1G (powers of 1024)."""
    match = re.fullmatch(r"(\d+)([KMG]?)I?B?", text.strip().upper())
    if match is None:
        raise typer.BadParameter(f"expected a size such as 16, 4K or 64M, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def sizes(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """begin, begin*factor, … up to end."""
    if not 1 <= begin <= end:
        raise typer.BadParameter(f"-b must be between 1 byte and -e, got -b {begin} -e {end}")
    if factor < 2:
        raise typer.BadParameter(f"-f multiplies the size and must be at least 2, got {factor}")
    result = [begin]
    while result[-1] * factor <= end:
        result.append(result[-1] * factor)
    return tuple(result)


def one_of(what: str, value: str, known) -> str:
    if value not in known:
        raise typer.BadParameter(f"{what}: expected one of {', '.join(known)}, got {value!r}")
    return value


def dtype_name(text: str) -> str:
    try:
        return jnp.dtype(text).name
    except TypeError:
        message = f"-d: expected a dtype such as float32 or bfloat16, got {text!r}"
        raise typer.BadParameter(message) from None


def command(spec: Spec, spec_path: Path) -> list[str]:
    """How the processes are started: as any other script, through `jaxring run`."""
    worker = ["-m", "jaxring.cli.bench_worker", str(spec_path)]
    if spec.processes == 1:
        return [sys.executable, *worker]
    launcher = [sys.executable, "-m", "jaxring", "run", "-n", str(spec.processes)]
    if spec.mode == "mesh" or spec.against == "lax":
        launcher.append("--distributed")
    return [*launcher, *worker]


def environment() -> dict[str, Any]:
    """Machine, versions and date, for the JSON file and the head of the table."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            return "(not installed)"

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in ("jaxring", "jax", "jaxlib")},
    }


def execute(spec: Spec, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Runs the processes, prints rows as they come and returns them; typer.Exit on failure."""
    layout = columns(spec)

    def print_row(row: dict[str, Any]) -> None:
        cells = (text(row).rjust(width) for _, width, text in layout)
        console.print(" ".join(cells), highlight=False, markup=False)

    spec_path = folder / "spec.json"
    spec.write(spec_path)
    header = " ".join(title.rjust(width) for title, width, _ in layout)
    console.print(header, style="bold", highlight=False, markup=False)
    follower = Follower(spec, print_row)
    follower.start()
    with open(folder / "output", "w+") as output:
        child = subprocess.Popen(
            command(spec, spec_path),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # `-m jaxring` must not find a source tree without a native module in this folder.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.wait(STOP_TIMEOUT_S)  # it got the same signal and stops its children
            code = INTERRUPTED
        finally:
            follower.finished.set()
            follower.join()
        if code == INTERRUPTED:
            raise typer.Exit(code)
        if code:
            output.seek(0)
            console.print(output.read(), markup=False, highlight=False)
            console.print(f"bench: a process failed with exit code {code}; its output is above")
            raise typer.Exit(code)
    return follower.rows


def bench(
    collective: Annotated[str, typer.Argument(help="Which collective: allreduce.")],
    processes: Annotated[int, typer.Option("-n", min=1, help="Processes.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="CPU devices per process.")] = 1,
    begin: Annotated[str, typer.Option("-b", help="Smallest size in bytes: 16, 4K, 1M.")] = "16",
    end: Annotated[str, typer.Option("-e", help="Largest size in bytes.")] = "64M",
    factor: Annotated[int, typer.Option("-f", help="Step between sizes.")] = 4,
    dtype: Annotated[str, typer.Option("-d", help="Data type.")] = "float32",
    op: Annotated[str, typer.Option("-o", help="Reduction.")] = "sum",
    warmup: Annotated[int, typer.Option("-w", min=1, help="Calls before timing.")] = 5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each contender.")] = 10,
    check: Annotated[bool, typer.Option("-c/-C", help="Compare with numpy (#wrong).")] = True,
    algorithm: Annotated[str, typer.Option(help="Algorithm, or auto.")] = "auto",
    against: Annotated[str | None, typer.Option(help="The peer to time beside us: lax.")] = None,
    mode: Annotated[
        str, typer.Option(help="mesh: an axis name; communicator: jaxring.init(), no mesh.")
    ] = "mesh",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
) -> None:
    if against is not None:
        one_of("--against", against, PEERS)
        one_of(f"--against {against}: -o", op, LAX_OPS)
    if one_of("--mode", mode, MODES) == "communicator" and devices != 1:
        raise typer.BadParameter("--mode communicator has one device per process; drop --devices")
    spec = Spec(
        collective=one_of("collective", collective, BUS_FACTORS),
        sizes_bytes=sizes(parse_size(begin), parse_size(end), factor),
        dtype=dtype_name(dtype),
        op=one_of("-o", op, FOLDS),
        algorithm=algorithm,
        mode=mode,
        processes=processes,
        devices=devices,
        against=against,
        warmup=warmup,
        rounds=rounds,
        check=check,
        results="",
    )
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = environment()
    console.print(
        f"# jaxring {machine['jaxring']}, jax {machine['jax']}, Python {machine['python']}, "
        f"{machine['cores']} cores of {machine['cpu']}\n"
        f"# {collective} of {spec.ranks} ranks: {processes} processes, {devices} devices each, "
        f"{mode}; medians, contenders take turns, slowest process; algbw and busbw in GB/s",
        highlight=False,
    )
    with tempfile.TemporaryDirectory(prefix="jaxring-bench-") as name:
        spec = Spec(**{**asdict(spec), "results": f"{name}/rows"})
        rows = execute(spec, Path(name), console)
    if json_file:
        document = {"environment": machine, "spec": asdict(spec), "rows": rows}
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if any(row["wrong"] for row in rows):
        console.print("bench: there are wrong results", style="red")
        raise typer.Exit(1)


bench.__doc__ = HELP

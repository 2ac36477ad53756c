"""`jaxring bench`: times a collective as nccl-tests does, ours and a peer's in the same processes.

The columns are nccl-tests' (size, count, type, redop, time, algbw, busbw, #wrong), with the
algorithm that really ran. busbw is what the hardware carried (bench_collectives.py).
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from jaxring._src import native_facts

from . import bench_compare, bench_plot, files, plots
from .bench_collectives import COLLECTIVES, FOLDS
from .bench_mode import PatienceOption, slow_round_trip_ns
from .bench_options import (
    check_against,
    check_served,
    check_shape,
    dtype_name,
    one_of,
    parse_size,
    sizes,
)
from .bench_table import Follower, Row, columns
from .bench_worker import MPI_PEERS, Spec

MODES = ("mesh", "communicator")
STOP_TIMEOUT_S = 10
INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it

HELP = """Time a collective with nccl-tests' columns, beside a peer in the same processes.

Examples:

  jaxring bench allreduce -n 2 -b 16 -e 64M -f 4 --against lax

  jaxring bench allreduce -n 1 --devices 4 -e 16M --against lax --json out.json

  jaxring bench allreduce -n 4 --mode communicator -d bfloat16 --algorithm ring

  jaxring bench allreduce -n 1 --devices 8 -b 16 -e 1M --slope 17 --against lax

  jaxring bench allreduce -n 2 -b 64M -e 64M --outputs in-place --against lax

  jaxring bench allreduce -n 2 --against lax --plot speed.png

  jaxring bench allreduce -n 2 --against lax --compare released.json      (written by --json)

Exit codes: 0; 1 if results are wrong, or --compare finds a loss; 2 if an option has no meaning;
that of a process that failed; 130 after Ctrl-C.
"""


def command(spec: Spec, spec_path: Path) -> list[str]:
    """How the processes are started: as any other script, through `jaxring run`."""
    worker = ["-m", "jaxring.cli.bench_worker", str(spec_path)]
    if spec.against in MPI_PEERS:
        return ["mpiexec", "-n", str(spec.processes), sys.executable, *worker]
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
        progress.advance(task)

    spec_path = folder / "spec.json"
    spec.write(spec_path)
    header = " ".join(title.rjust(width) for title, width, _ in layout)
    console.print(header, style="bold", highlight=False, markup=False)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("measuring", total=len(spec.sizes_bytes))
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
            with progress:
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


def measured(spec: Spec, console: Console) -> tuple[list[Row], dict[str, Any]]:
    """The rows, and the machine's state around them."""
    slow_ns = slow_round_trip_ns()
    before_ns = native_facts.cache_line_round_trip_ns()
    with tempfile.TemporaryDirectory(prefix="jaxring-bench-") as name:
        rows = execute(replace(spec, results=f"{name}/rows", slow_ns=slow_ns), Path(name), console)
    around_ns = (before_ns, native_facts.cache_line_round_trip_ns())
    console.print(
        f"# cache-line round trip before and after: {around_ns[0]:.0f} and {around_ns[1]:.0f} ns",
        highlight=False,
    )
    slow = [row["size_bytes"] for row in rows if row["slow_rounds"]]
    if slow:
        console.print(
            f"bench: above {slow_ns:.0f} ns this machine is busy or in a slow mode, which"
            f" rounds of {', '.join(map(str, slow))} bytes met; don't compare their times with"
            " others, or give --patience-s",
            style="yellow",
        )
    return rows, {"cache_line_round_trip_ns": around_ns, "slow_mode": bool(slow)}


def described(spec: Spec) -> str:
    how = f"slope of {spec.chain} dependent operations" if spec.chain else "whole calls"
    cut = f", {spec.leaves} leaves" if spec.leaves > 1 else ""
    return f"{how}, {spec.outputs} outputs{cut}"


def bench(
    collective: Annotated[
        str, typer.Argument(metavar="COLLECTIVE", help=f"One of {', '.join(COLLECTIVES)}.")
    ],
    processes: Annotated[int, typer.Option("-n", min=1, help="Processes.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="CPU devices per process.")] = 1,
    begin: Annotated[str, typer.Option("-b", help="Smallest size in bytes: 16, 4K, 1M.")] = "16",
    end: Annotated[str, typer.Option("-e", help="Largest size in bytes.")] = "64M",
    factor: Annotated[int, typer.Option("-f", min=2, help="From size to size, times this.")] = 4,
    dtype: Annotated[str, typer.Option("-d", help="Data type of jax.numpy.")] = "float32",
    op: Annotated[str, typer.Option("-o", help="Reduction: sum, mean, max, …")] = "sum",
    warmup: Annotated[int, typer.Option("-w", min=1, help="Calls before timing.")] = 5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each contender.")] = 10,
    slope: Annotated[
        int, typer.Option("--slope", min=0, help="Time per operation of so many in one jit.")
    ] = 0,
    outputs: Annotated[
        str, typer.Option(help="fresh; donated: results reuse operands; in-place: ours too.")
    ] = "fresh",
    leaves: Annotated[int, typer.Option(min=1, help="Arrays that the operand is cut into.")] = 1,
    patience_s: PatienceOption = 10,
    check: Annotated[
        bool, typer.Option("-c/-C", show_default=False, help="Compare with numpy (#wrong), or not.")
    ] = True,
    algorithm: Annotated[str, typer.Option(help="Algorithm, or auto.")] = "auto",
    against: Annotated[
        str | None, typer.Option(help="The peer beside us: lax, mpi or mpi4jax.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="mesh: an axis name; communicator: jaxring.init(), no mesh.")
    ] = "mesh",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time and busbw (needs matplotlib): speed.png.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Have ratios to the peer become worse than in this file by --json?"),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=1, help="By which factor a ratio may be lower for --compare.")
    ] = 1.3,
) -> None:
    if against is not None:
        check_against(against, collective, op)
    check_shape(collective, slope, outputs, leaves)
    if one_of("--mode", mode, MODES) == "communicator" and devices != 1:
        raise typer.BadParameter("--mode communicator has one device per process; drop --devices")
    spec = Spec(
        collective=one_of("collective", collective, COLLECTIVES),
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
        chain=slope,
        outputs=outputs,
        leaves=leaves,
        patience_s=patience_s,
    )
    check_served(spec.collective, algorithm, spec.op, spec.dtype)
    if plot is not None:
        plots.require(plot)
    if json_file is not None:
        files.require_writable("--json", json_file)
    old = bench_compare.read(compare, spec) if compare is not None else []
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = environment()
    console.print(
        f"# jaxring {machine['jaxring']}, jax {machine['jax']}, Python {machine['python']}, "
        f"{machine['cores']} cores of {machine['cpu']}\n"
        f"# {collective} of {spec.ranks} ranks: {processes} processes, {devices} devices each, "
        f"{mode}; {described(spec)}; medians, contenders take turns, slowest process; "
        "algbw and busbw in GB/s",
        highlight=False,
    )
    rows, state = measured(spec, console)
    if json_file:
        document = {"environment": machine | state, "spec": asdict(spec), "rows": rows}
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if plot is not None:
        bench_plot.draw(rows, spec, plot)
    compared = bench_compare.compare(old, rows, tolerance) if compare is not None else None
    if compared is not None and compare is not None:
        console.print(bench_compare.text(compared, compare), highlight=False, markup=False)
    if any(row["wrong"] for row in rows):
        console.print("bench: there are wrong results", style="red")
        raise typer.Exit(1)
    if compared is not None and compared["lost"]:
        raise typer.Exit(1)


bench.__doc__ = HELP

"""The options of `jaxring bench`: what they mean, and which don't go together."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil

import jax.numpy as jnp
import typer

from jaxring._src import calls, reductions
from jaxring.errors import UsageError

from .bench_collectives import BY_MPI4JAX, COLLECTIVES, LAX_OPS
from .bench_worker import MPI_PEERS

PEERS = ("lax", "mpi", "mpi4jax")
OUTPUTS = ("fresh", "donated", "in-place")
KEEPS_SHAPE = ("allreduce", "all_to_all", "broadcast", "reduce", "ppermute")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


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


def mpi_problem(against: str) -> str | None:
    """Why the peer cannot be timed on this machine, if so."""
    if shutil.which("mpiexec") is None:
        return "needs mpiexec (an MPI installation, such as the PyPI package mpich)"
    if against == "mpi" and not os.environ.get("MPITRAMPOLINE_LIB"):
        return "needs MPIwrapper: set MPITRAMPOLINE_LIB to its libmpiwrapper.so (see jax's docs)"
    if against == "mpi4jax" and importlib.util.find_spec("mpi4jax") is None:
        return "needs the package mpi4jax"
    return None


def check_against(against: str, collective: str, op: str) -> None:
    one_of("--against", against, PEERS)
    if against in MPI_PEERS and (problem := mpi_problem(against)):
        raise typer.BadParameter(f"--against {against}: {problem}")
    if against == "mpi4jax":
        one_of("--against mpi4jax: collective", collective, BY_MPI4JAX)
        one_of("--against mpi4jax: -o", op, ("sum", "prod", "min", "max"))
        return
    peers = [name for name, kind in COLLECTIVES.items() if kind.peer]
    one_of(f"--against {against}: collective", collective, peers)
    sums_only = collective == "reduce_scatter"
    one_of(f"--against {against}: -o", op, ("sum",) if sums_only else LAX_OPS)


def check_served(collective: str, algorithm: str, op: str, dtype: str) -> None:
    """Refuses what every rank would refuse, in the library's own words."""
    kind = COLLECTIVES[collective]
    if algorithm != "auto" and not kind.algorithms:
        raise typer.BadParameter(f"--algorithm: {collective} takes none, got {algorithm!r}")
    try:
        if kind.algorithms:
            calls.how(algorithm, None, "bench", collective, op if kind.reduces else "")
        if kind.reduces:
            reductions.kind(jnp.dtype(dtype), op, "bench")
    except UsageError as e:
        raise typer.BadParameter(str(e)) from None


def check_shape(collective: str, slope: int, outputs: str, leaves: int) -> None:
    """Refuses options that don't go together."""
    if slope == 1:
        raise typer.BadParameter("--slope is the time per operation of 2 or more in one jit, got 1")
    if one_of("--outputs", outputs, OUTPUTS) == "in-place":
        one_of("--outputs in-place: collective", collective, ("allreduce",))
    if outputs != "fresh":
        one_of(f"--outputs {outputs}: collective", collective, KEEPS_SHAPE)
    if leaves > 1:
        one_of("--leaves: collective", collective, ("allreduce",))

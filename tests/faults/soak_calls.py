"""The collective calls of the soak, compiled ahead, and what they must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from soak_plan import Injection

import jaxring

Call = Callable[[], jax.Array]


def operand(injection: Injection, rank: int, size: int, dtype: Any = np.float32) -> np.ndarray:
    """Small integers, distinct by rank; of a row for each rank where the collective wants rows."""
    rows = injection.world_size if _takes_rows(injection.collective) else 1
    values = (np.arange(rows * (size // rows)) * 7 + rank * 13 + injection.number) % 101
    shape = (rows, size // rows) if _takes_rows(injection.collective) else (size,)
    return values.astype(dtype).reshape(shape)


def _takes_rows(collective: str) -> bool:
    return collective in ("reduce_scatter", "all_to_all")


def expected(injection: Injection, rank: int) -> np.ndarray:
    """The result on `rank`."""
    n = injection.world_size
    xs = np.stack([operand(injection, r, injection.size) for r in range(n)])
    root = injection.number % n
    match injection.collective:
        case "allreduce":
            return xs.sum(0)
        case "reduce_scatter":
            return xs.sum(0)[rank]
        case "all_gather":
            return xs
        case "all_to_all":
            return xs[:, rank]
        case "broadcast":
            return xs[root]
        case "reduce":
            return xs.sum(0) * (rank == root)
        case "ppermute":
            return xs[(rank - 1) % n]
    return xs[rank]


def prepare(
    injection: Injection, comm: jaxring.Communicator, differently: str = "", other: bool = False
) -> Call:
    """The injection's call, compiled, with this rank's operand.

    Args:
      differently: "shape", "dtype", "op" or "algorithm": the call of a rank that differs in that.
      other: another collective with the same operand instead, to exchange the order of two.
    """
    n = comm.world_size
    root = injection.number % n
    size = injection.size + n if differently == "shape" else injection.size
    dtype = np.int32 if differently == "dtype" else np.float32
    op = "max" if differently == "op" else "sum"
    algorithm: Any = injection.algorithm
    if differently == "algorithm":
        algorithm = "tree" if algorithm != "tree" else "ring"
    ring = [(r, (r + 1) % n) for r in range(n)]
    functions: dict[str, Callable[[Any], Any]] = {
        "allreduce": lambda x: jaxring.allreduce(x, comm, op, algorithm=algorithm),
        "reduce_scatter": lambda x: jaxring.reduce_scatter(x, comm, op),
        "all_gather": lambda x: jaxring.all_gather(x, comm),
        "all_to_all": lambda x: jaxring.all_to_all(x, comm, 0, 0),
        "broadcast": lambda x: jaxring.broadcast(x, comm, root),
        "reduce": lambda x: jaxring.reduce(x, comm, op, root=root),
        "ppermute": lambda x: jaxring.ppermute(x, comm, ring),
        "barrier": lambda x: jaxring.barrier(comm, x),
    }
    name = injection.collective
    if other:
        name = "allreduce" if name == "broadcast" else "broadcast"
    x = jax.numpy.asarray(operand(injection, comm.rank, size, dtype))
    compiled = jax.jit(functions[name]).lower(x).compile()
    return lambda: compiled(x)

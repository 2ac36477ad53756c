"""What `jaxring bench` can time: one entry for each collective.

Sizes are nccl-tests': of the larger one of a rank's operand and result. busbw is algbw times the
factor of nccl-tests' PERFORMANCE.md, so that it can be compared with what the hardware carries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from .bench_worker import Spec

# nccl-tests' name of each op, and what it does to the ranks' values.
FOLDS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.logical_and,
    "or": np.logical_or,
}
LAX_OPS = {"sum": lax.psum, "mean": lax.pmean, "min": lax.pmin, "max": lax.pmax}


@dataclass(frozen=True)
class Kind:
    """How one collective is called, on a flat operand.

    Attributes:
      ours: (x, axis, spec) -> result.
      peer: the same by lax, or None where lax has nothing like it.
      expected: (operands of all ranks, rank, spec) -> this rank's result, in exact arithmetic.
      bus_factor: of the number of ranks.
      shrinks: a rank's operand is a rank's share of the size (the result is the whole).
      reduces: whether it has an op, and so which values are exact.
      algorithms: whether it takes an algorithm.
    """

    ours: Callable[[Any, Any, Spec], Any]
    peer: Callable[[Any, Any, Spec], Any] | None
    expected: Callable[[list[np.ndarray], int, Spec], np.ndarray]
    bus_factor: Callable[[int], float]
    shrinks: bool = False
    reduces: bool = False
    algorithms: bool = False


def fold(operands: list[np.ndarray], spec: Spec) -> np.ndarray:
    total = operands[0]
    for other in operands[1:]:
        total = FOLDS[spec.op](total, other)
    return total / spec.ranks if spec.op == "mean" else total


def share(x: Any, rank: int, ranks: int) -> Any:
    return x.reshape(ranks, -1)[rank]


def shift(ranks: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


def ours(name: str, *args: Any, **kw: Any) -> Callable[[Any, Any, Spec], Any]:
    """`jaxring.<name>(x, axis, …)`, with the op and algorithm of the spec where it takes them."""

    def call(x: Any, axis: Any, spec: Spec) -> Any:
        import jaxring

        kind = COLLECTIVES[name]
        more = {"op": spec.op} if kind.reduces else {}
        more |= {"algorithm": spec.algorithm} if kind.algorithms else {}
        return getattr(jaxring, name)(x, axis, *args, **kw, **more)

    return call


def broadcast_by_lax(x: Any, axis: Any, spec: Spec) -> Any:
    del spec
    here = lax.axis_index(axis) == 0
    return lax.psum(jax.numpy.where(here, x, 0), axis)


BY_MPI4JAX = ("allreduce", "all_gather", "all_to_all", "broadcast")


def by_mpi4jax(name: str, x: Any, axis: Any, spec: Spec) -> Any:
    """The collective by the library mpi4jax, on MPI's world."""
    import mpi4jax  # pyright: ignore[reportMissingImports]  (an optional peer)
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    del axis
    ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    calls = {
        "allreduce": lambda: mpi4jax.allreduce(x, op=ops[spec.op]),
        "all_gather": lambda: mpi4jax.allgather(x).reshape(-1),
        "all_to_all": lambda: mpi4jax.alltoall(x.reshape(spec.ranks, -1)).reshape(-1),
        "broadcast": lambda: mpi4jax.bcast(x, 0),
    }
    return calls[name]()


COLLECTIVES: dict[str, Kind] = {
    "allreduce": Kind(
        ours=ours("allreduce"),
        peer=lambda x, axis, spec: LAX_OPS[spec.op](x, axis),
        expected=lambda xs, rank, spec: fold(xs, spec),
        bus_factor=lambda n: 2 * (n - 1) / n,
        reduces=True,
        algorithms=True,
    ),
    "reduce_scatter": Kind(
        ours=ours("reduce_scatter", tiled=True),
        peer=lambda x, axis, spec: lax.psum_scatter(x, axis, tiled=True),
        expected=lambda xs, rank, spec: share(fold(xs, spec), rank, spec.ranks),
        bus_factor=lambda n: (n - 1) / n,
        reduces=True,
        algorithms=True,
    ),
    "all_gather": Kind(
        ours=ours("all_gather", tiled=True),
        peer=lambda x, axis, spec: lax.all_gather(x, axis, tiled=True),
        expected=lambda xs, rank, spec: np.concatenate(xs),
        bus_factor=lambda n: (n - 1) / n,
        shrinks=True,
        algorithms=True,
    ),
    "all_to_all": Kind(
        ours=ours("all_to_all", 0, 0, tiled=True),
        peer=lambda x, axis, spec: lax.all_to_all(x, axis, 0, 0, tiled=True),
        expected=lambda xs, rank, spec: np.concatenate([share(x, rank, spec.ranks) for x in xs]),
        bus_factor=lambda n: (n - 1) / n,
    ),
    "broadcast": Kind(
        ours=ours("broadcast"),
        peer=broadcast_by_lax,
        expected=lambda xs, rank, spec: xs[0],
        bus_factor=lambda n: 1.0,
    ),
    "reduce": Kind(
        ours=ours("reduce"),
        peer=None,
        expected=lambda xs, rank, spec: fold(xs, spec) * (rank == 0),
        bus_factor=lambda n: 1.0,
        reduces=True,
    ),
    "ppermute": Kind(
        ours=lambda x, axis, spec: ours("ppermute", shift(spec.ranks))(x, axis, spec),
        peer=lambda x, axis, spec: lax.ppermute(x, axis, shift(spec.ranks)),
        expected=lambda xs, rank, spec: xs[rank - 1],
        bus_factor=lambda n: 1.0,
    ),
}

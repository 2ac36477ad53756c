"""allreduce in two halves: what is computed between them runs while the ranks communicate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxring._src import allreduce, calls
from jaxring.errors import UsageError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """An allreduce that has begun; a pytree, so that loops and functions can carry it.

    Attributes:
      operand: what `allreduce_start` was given. It may not be given up while the call reads it, and
        XLA sees to that; it is here for programs that want it back.
      result: what `allreduce_done` gives. Reading it waits for it.
    """

    operand: Any
    result: Any


def allreduce_start(
    x: Any,
    axis_name: Any,
    op: str = "sum",
    *,
    algorithm: str = "auto",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    name: str | None = None,
) -> Handle:
    """Begins `jaxring.allreduce` of `x`; `jaxring.allreduce_done` gives the result.

    In one jitted program, everything between the two that does not need the result is computed
    meanwhile: on CPUs the operation is a future of XLA's, which goes on with what is independent of
    it; on GPUs it is enqueued on the stream that XLA gives it, and overlaps where XLA has work for
    other streams. Between programs nothing overlaps.

    Args and errors are those of `jaxring.allreduce`.

    Returns:
      A `Handle`, a pytree that carries `x` and the result to come. It can be carried by scan, given
      to another function, vmapped and differentiated. XLA gives no buffer of `x` to anything else
      before the operation is done with it, also if `x` is donated.

    Derivative: that of `jaxring.allreduce`.

    Example, on 4 devices; the product does not wait for the sum:

        def f(gradient, x):
            handle = jaxring.allreduce_start(gradient, "dp")
            y = x @ x
            return jaxring.allreduce_done(handle), y
        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = jax.shard_map(f, mesh=mesh, in_specs=(P("dp"), P()), out_specs=(P(), P()))
        total, y = jax.jit(f)(jnp.ones(4), jnp.eye(1000))
    """
    call = calls.describe("allreduce_start", name)
    result = allreduce.of_pytree(
        x, axis_name, op, algorithm, axis_index_groups, name, call, overlaps=True
    )
    return Handle(x, result)


def allreduce_done(handle: Handle) -> Any:
    """The result of an allreduce that `jaxring.allreduce_start` has begun.

    Args:
      handle: what it returned.

    Returns:
      What `jaxring.allreduce` of the same arguments would: the structure and shapes of `x`.

    Raises:
      UsageError (a ValueError): `handle` is something else.

    Derivative: the identity's.

    Example: see `jaxring.allreduce_start`.
    """
    if not isinstance(handle, Handle):
        raise UsageError(
            "jaxring.allreduce_done: expected what jaxring.allreduce_start returned, got"
            f" {type(handle).__name__}"
        )
    return handle.result

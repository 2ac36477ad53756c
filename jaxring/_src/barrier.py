"""barrier: no rank goes on before all have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxring._src import axes, calls, operands, primitive
from jaxring._src.axes import Where
from jaxring._src.calls import How
from jaxring.communicator import Communicator
from jaxring.errors import UsageError


def barrier(axis_name: Any, x: Any = None, *, name: str | None = None) -> Any:
    """Returns `x` when every rank of an axis or communicator has come here with its own.

    What is computed from the result comes after the barrier, and what `x` was computed from before
    it; XLA may move anything else across.

    Args:
      axis_name: a bound axis name, a tuple of them (mesh axes and vmap axes may mix), or a
        `jaxring.Communicator`.
      x: an array or a pytree of arrays of any shapes and dtypes; not copied. It may differ between
        ranks in everything but the number of leaves. Without it, the call blocks until all ranks
        are there; that is for a Communicator outside jit.
      name: appears in errors, timeline and profiler.

    Returns:
      `x`, of the same types.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: that of the identity.

    Example: time a step from a common start

        comm = jaxring.init()
        jaxring.barrier(comm)
        start = time.perf_counter()
    """
    call = calls.describe("barrier", name)
    if not jax.tree.leaves(x):
        return _eager(axis_name, name, call)
    where = axes.resolve(axis_name, None, call).unsized()
    how = calls.how("auto", name, call, "barrier", op="")
    leaves, structure = jax.tree.flatten(x)
    moved = [operands.movable(leaf, call) for leaf in leaves]
    values: Sequence[Any] = [leaf.operand for leaf in moved]
    if calls.served_by_lax(where, how, call):
        values = [_by_lax(x, where=where) for x in values]
    elif where.axes or where.communicator:
        with jax.named_scope(name or "jaxring.barrier"):
            values = bind(*values, where=where, how=how)
    results = [leaf.finish(y) for leaf, y in zip(moved, values, strict=True)]
    return jax.tree.unflatten(structure, results)


def _eager(axis_name: Any, name: str | None, call: str) -> None:
    if not isinstance(axis_name, Communicator):
        raise UsageError(
            f"{call}: over an axis it is ordered through x, which holds no array here; pass one and"
            " use the result: x = jaxring.barrier(axis_name, x)"
        )
    token = barrier(axis_name, jnp.zeros(()), name=name)
    if isinstance(token, Tracer):
        raise UsageError(
            f"{call}: without x it blocks, which it cannot while JAX traces; pass an array and use"
            " the result: x = jaxring.barrier(comm, x)"
        )
    token.block_until_ready()


def bind(*xs: Any, where: Where, how: How) -> Sequence[Any]:
    return barrier_p.bind(*xs, where=where, how=how)


def _by_lax(x: Any, *, where: Where) -> Any:
    everyone = lax.psum(axes.cast_varying(jnp.zeros(()), where.checked), where.axes)
    return lax.optimization_barrier((x, everyone))[0]


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    return list(avals), axes.effects(where)


def _lower(ctx: Any, *values: Any, where: Where, how: How) -> Sequence[Any]:
    return calls.lower(ctx, values, "barrier", where, how, in_place=True)


def _batch(axis_data: Any, xs: Any, dims: Any, *, where: Where, how: How) -> Any:
    rest = where.without(axis_data.name)
    return (bind(*xs, where=rest, how=how) if rest.axes or rest.communicator else xs), dims


def _jvp(primals: Any, tangents: Any, *, where: Where, how: How) -> Any:
    return bind(*primals, where=where, how=how), tangents


def _transpose(cotangents: Any, *xs: Any, where: Where, how: How) -> Any:
    return primitive.transpose_of_linear(lambda *cts: cts, cotangents, xs)


barrier_p = primitive.define(
    "barrier",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("barrier", _by_lax),
)

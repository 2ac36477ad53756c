"""reduce: the root gets the reduction of all ranks' operands, the others zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxring._src import axes, calls, operands, primitive, reductions
from jaxring._src.axes import Where
from jaxring._src.calls import How


def reduce(
    x: Any, axis_name: Any, op: str = "sum", *, root: int = 0, name: str | None = None
) -> Any:
    """Reduces `x` over all ranks of an axis or communicator; rank `root` gets the result.

    The root reads all operands, or their sums come up a double binary tree (Sanders, Speck & Träff
    2009), by message size and topology.

    Args:
      x: an array or a pytree of arrays of any shapes. Leaves of one dtype travel in one operation,
        or in several of at most the setting `bucket_bytes`.
      axis_name: a bound axis name, a tuple of them (mesh axes and vmap axes may mix), or a
        `jaxring.Communicator`.
      op: "sum", "mean", "prod", "min", "max", or for bool also "and", "or". NaN anywhere gives NaN
        for min and max.
      root: the rank that gets the result; among several axes the last one counts fastest.
      name: appears in errors, timeline and profiler.

    Returns:
      The structure of `x`, with its shapes; zeros on other ranks than the root. Dtypes are those of
      `x`, except that mean gives float32 for integers and bool, and sum and prod give int32 for
      bool. Under check_vma=True the result varies over the axis.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: for sum and mean the transpose is a broadcast of the root's cotangent; for min and
    max the tangent is split evenly over ties; prod differentiates also at zeros.

    Example, on 4 devices; `sums` is [6, 0, 0, 0]:

        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda: jaxring.reduce(jaxring.axis_index("dp")[None], "dp")
        sums = jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P("dp"))()
    """
    call = calls.describe("reduce", name)
    reductions.check_op(op, call)
    where = axes.resolve(axis_name, None, call)
    how = calls.how("auto", name, call, "reduce", op)
    rank, where = axes.check_rank(root, where, "root", call), where.unsized()
    return operands.over_leaves(
        x,
        lambda leaf: operands.Leaf(*reductions.prepare(leaf, op, call)),
        lambda *xs, op: bind(*xs, op=op, root=rank, where=where, how=how),
        collective="reduce",
        call=call,
        where=where,
        how=how,
        by_lax=lambda x, op, where: _by_lax(x, op=op, root=rank, where=where),
    )


def bind(*xs: Any, op: str, root: int, where: Where, how: How) -> Sequence[Any]:
    xs = tuple(axes.cast_varying(x, where.checked) for x in xs)
    return reduce_p.bind(*xs, op=op, root=root, where=where, how=how)


def _by_lax(x: Any, *, op: str, root: int, where: Where) -> Any:
    y = axes.cast_varying(reductions.by_lax(x, op=op, where=where), where.checked)
    return jnp.where(axes.rank(where) == root, y, jnp.zeros_like(y))


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(
    *avals: Any, op: str, root: int, where: Where, how: How
) -> tuple[list[Any], set[Any]]:
    return [axes.varying_result(aval, where) for aval in avals], axes.effects(where)


def _lower(ctx: Any, *values: Any, op: str, root: int, where: Where, how: How) -> Sequence[Any]:
    return calls.lower(ctx, values, "reduce", where, how, op=op, root=root)


def _batch(
    axis_data: Any, xs: Any, dims: Any, *, op: str, root: int, where: Where, how: How
) -> Any:
    if axis_data.name not in where.axes:
        return bind(*xs, op=op, root=root, where=where, how=how), dims
    own, others = axes.split_rank(root, where, (axis_data.name,))
    rest = where.without(axis_data.name)
    wide = [reductions.over_batch(x, d, op, axis_data.size) for x, d in zip(xs, dims, strict=True)]
    if rest.axes:
        wide = bind(*wide, op=op, root=others, where=rest, how=how)

    def at_root(y: Any) -> Any:
        here = (np.arange(axis_data.size) == own).reshape(-1, *[1] * y.ndim)
        return jnp.where(here, y[None], np.zeros((), y.dtype))

    return [at_root(y.astype(x.dtype)) for x, y in zip(xs, wide, strict=True)], [0] * len(xs)


def _jvp(primals: Any, tangents: Any, *, op: str, root: int, where: Where, how: How) -> Any:
    def reduce(*xs: Any, op: str) -> Sequence[Any]:
        return bind(*xs, op=op, root=root, where=where, how=how)

    def spread(*ys: Any) -> Sequence[Any]:
        return primitive.bind("broadcast", *ys, root=root, to="varying", where=where, how=how)

    return reductions.jvp(primals, tangents, op, reduce, spread)


def _transpose(cotangents: Any, *xs: Any, op: str, root: int, where: Where, how: How) -> Any:
    reductions.check_transposable(op, "reduce", how.name)

    def from_root(*cotangents: Any) -> Sequence[Any]:
        varying = [axes.cast_varying(ct, where.checked) for ct in cotangents]
        cts = primitive.bind("broadcast", *varying, root=root, to="varying", where=where, how=how)
        if op == "sum":
            return cts
        if not where.communicator:
            return [ct / lax.axis_size(where.axes) for ct in cts]
        # The number of ranks is known at run time only.
        (ranks,) = primitive.bind("allreduce", jnp.float32(1), op="sum", where=where, how=how)
        return [ct / ranks.astype(ct.dtype) for ct in cts]

    return primitive.transpose_of_linear(from_root, cotangents, xs)


reduce_p = primitive.define(
    "reduce",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("reduce", _by_lax),
)

"""reduce_scatter: every rank gets its part of the reduction of all ranks' operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxring._src import axes, calls, operands, partial_sums, primitive, reductions
from jaxring._src.axes import Where
from jaxring._src.calls import How


def reduce_scatter(
    x: Any,
    axis_name: Any,
    op: str = "sum",
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    algorithm: str = "auto",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    name: str | None = None,
) -> Any:
    """Reduces `x` over all ranks of an axis or communicator; rank r gets part r of the result.

    The ring algorithm is the first half of the ring allreduce (Patarasuk & Yuan 2009): each rank
    sends (p - 1) / p of its operand.

    Args:
      x: an array or a pytree of arrays. Leaves of one dtype travel in one operation, or in several
        of at most the setting `bucket_bytes`.
      axis_name: a bound axis name, a tuple of them (mesh axes and vmap axes may mix), or a
        `jaxring.Communicator`.
      op: "sum", "mean", "prod", "min", "max", or for bool also "and", "or". NaN anywhere gives NaN
        for min and max.
      scatter_dimension: the dimension of each leaf that is cut.
      tiled: False when that dimension has one element for each rank, which is then removed; True to
        cut it into equal parts.
      algorithm: "auto" or a name that `jaxring info` lists for reduce_scatter.
      axis_index_groups: disjoint lists of axis indices, equally long, that cover the axis; each
        list reduces for itself.
      name: appears in errors, timeline and profiler.

    Returns:
      The structure of `x`. A dimension of size n becomes n / p on p ranks, or is removed. Dtypes
      are those of `x`, except that mean gives float32 for integers and bool, and sum and prod give
      int32 for bool. Under check_vma=True the result varies over the axis.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: for sum and mean the transpose is an all_gather; for min and max the tangent is
    split evenly over ties; prod differentiates also at zeros.

    Example, on 4 devices; every device gets one element of [0, 4, 8, 12]:

        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda: jaxring.reduce_scatter(jnp.arange(4), "dp", tiled=True)
        parts = jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P("dp"))()
    """
    call = calls.describe("reduce_scatter", name)
    return of_pytree(
        x, axis_name, op, scatter_dimension, tiled, algorithm, axis_index_groups, name, call
    )


def of_pytree(
    x: Any,
    axis_name: Any,
    op: str,
    scatter_dimension: int,
    tiled: bool,
    algorithm: str,
    axis_index_groups: Any,
    name: str | None,
    call: str,
) -> Any:
    """reduce_scatter under any public name; `call` begins the error messages."""
    reductions.check_op(op, call)
    where = axes.resolve(axis_name, axis_index_groups, call, groups_typed=True)
    how = calls.how(algorithm, name, call, "reduce_scatter", op)
    how = dataclasses.replace(how, layout=f"scatter_dimension={scatter_dimension}")

    def prepare(leaf: Any) -> operands.Leaf:
        operand, kind = reductions.prepare(leaf, op, call)
        operand = partial_sums.as_terms(operand, op, where, call)
        dimension = operands.check_axis(scatter_dimension, operand.ndim, "scatter_dimension", call)
        rows = operands.cut_rows(operand, dimension, where, tiled, "scatter_dimension", call)
        return operands.Leaf(rows, kind)

    return operands.over_leaves(
        x,
        prepare,
        lambda *xs, op: bind(*xs, op=op, where=where, how=how),
        collective="reduce_scatter",
        call=call,
        where=where,
        how=how,
        by_lax=_by_lax,
    )


def bind(*xs: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    """Of operands (p, *s) on p ranks: rank r gets the reduction of row r, of shape (*s)."""
    xs = tuple(axes.cast_varying(x, where.checked) for x in xs)
    return reduce_scatter_p.bind(*xs, op=op, where=where, how=how)


def _by_lax(x: Any, *, op: str, where: Where) -> Any:
    if op in ("sum", "mean"):
        y = lax.psum_scatter(x, where.axes, axis_index_groups=where.groups)
        return y / x.shape[0] if op == "mean" else y
    y = axes.cast_varying(reductions.by_lax(x, op=op, where=where), where.checked)
    return lax.dynamic_index_in_dim(y, axes.rank(where), keepdims=False)


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, op: str, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    rows = [axes.varying_result(axes.row_of(aval), where) for aval in avals]
    return rows, axes.effects(where)


def _lower(ctx: Any, *values: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    alone = lambda x: x[0]  # noqa: E731
    return calls.lower(ctx, values, "reduce_scatter", where, how, op=op, alone=alone)


def _batch(axis_data: Any, xs: Any, dims: Any, *, op: str, where: Where, how: How) -> Any:
    if axis_data.name not in where.axes:
        xs, dims = operands.behind_rows(xs, dims)
        dims_out = [None if d is None else d - 1 for d in dims]
        return bind(*xs, op=op, where=where, how=how), dims_out
    before, after = axes.around(where, axis_data.name, calls.describe("reduce_scatter", how.name))
    rest = where.without(axis_data.name)

    def by_batch(x: Any, d: int | None) -> Any:  # (rows of the other axes, batch, *s)
        y = reductions.over_batch(x, d, op, axis_data.size)
        y = y.reshape(before, axis_data.size, after, *y.shape[1:])
        return jnp.swapaxes(y, 1, 2).reshape(before * after, axis_data.size, *y.shape[3:])

    wide = [by_batch(x, d) for x, d in zip(xs, dims, strict=True)]
    parts = bind(*wide, op=op, where=rest, how=how) if rest.axes else [y[0] for y in wide]
    return [y.astype(x.dtype) for x, y in zip(xs, parts, strict=True)], [0] * len(xs)


def _jvp(primals: Any, tangents: Any, *, op: str, where: Where, how: How) -> Any:
    def reduce(*xs: Any, op: str) -> Sequence[Any]:
        return bind(*xs, op=op, where=where, how=how)

    def spread(*ys: Any) -> Sequence[Any]:
        return primitive.bind("all_gather", *ys, to="varying", where=where, how=how)

    return reductions.jvp(primals, tangents, op, reduce, spread)


def _transpose(cotangents: Any, *xs: Any, op: str, where: Where, how: How) -> Any:
    reductions.check_transposable(op, "reduce_scatter", how.name)

    def gather(*cts: Any) -> Sequence[Any]:
        cts = tuple(axes.cast_varying(ct, where.checked) for ct in cts)
        rows = primitive.bind("all_gather", *cts, to="varying", where=where, how=how)
        return [y / y.shape[0] for y in rows] if op == "mean" else rows

    return primitive.transpose_of_linear(gather, cotangents, xs)


reduce_scatter_p = primitive.define(
    "reduce_scatter",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("reduce_scatter", _by_lax),
)

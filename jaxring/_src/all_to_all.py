"""all_to_all: every rank sends a part of its operand to each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxring._src import axes, calls, operands, primitive
from jaxring._src.axes import Where
from jaxring._src.calls import How


def all_to_all(
    x: Any,
    axis_name: Any,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    name: str | None = None,
) -> Any:
    """Cuts `x` into one part for each rank, sends part r to rank r, and joins what comes.

    With `jax.lax.all_to_all`'s signature and results. Ranks exchange in pairs: in step i with the
    rank i further on (pairwise exchange; Thakur, Rabenseifner & Gropp 2005).

    Args:
      x: an array or a pytree of arrays; PRNG keys, too. Leaves of one dtype travel in one
        operation, or in several of at most the setting `bucket_bytes`.
      axis_name: a bound axis name, a tuple of them (mesh axes and vmap axes may mix), or a
        `jaxring.Communicator`.
      split_axis: the dimension of each leaf that is cut.
      concat_axis: the dimension of the result along which the parts lie, in the order of the ranks
        that they come from.
      tiled: False when `split_axis` has one element for each rank, and is removed before a new
        dimension `concat_axis` is made; True to cut into equal parts and concatenate them.
      axis_index_groups: disjoint lists of axis indices, equally long, that cover the axis; each
        list exchanges for itself.
      name: appears in errors, timeline and profiler.

    Returns:
      The structure and dtypes of `x`. With tiled=False the dimension of size p moves from
      `split_axis` to `concat_axis`; with tiled=True, sizes are divided and multiplied by p. Under
      check_vma=True the result varies over the axis.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: the transpose is the all_to_all back.

    Example, on 4 devices; device r has row r before and column r after:

        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda row: jaxring.all_to_all(row, "dp", split_axis=1, concat_axis=0, tiled=True)
        by_column = jax.shard_map(f, mesh=mesh, in_specs=P("dp", None), out_specs=P(None, "dp"))
        by_column(jnp.arange(16).reshape(4, 4))
    """
    call = calls.describe("all_to_all", name)
    return of_pytree(x, axis_name, split_axis, concat_axis, tiled, axis_index_groups, name, call)


def of_pytree(
    x: Any,
    axis_name: Any,
    split_axis: int,
    concat_axis: int,
    tiled: bool,
    axis_index_groups: Any,
    name: str | None,
    call: str,
) -> Any:
    """all_to_all under any public name; `call` begins the error messages."""
    where = axes.resolve(axis_name, axis_index_groups, call, groups_typed=True)
    how = calls.how("auto", name, call, "all_to_all", op="")
    how = dataclasses.replace(how, layout=f"split_axis={split_axis}")

    def prepare(leaf: Any) -> operands.Leaf:
        ndim = jnp.ndim(leaf)
        split = operands.check_axis(split_axis, ndim, "split_axis", call)
        concat = operands.check_axis(concat_axis, ndim, "concat_axis", call)
        moved = operands.movable(leaf, call)
        rows = operands.cut_rows(moved.operand, split, where, tiled, "split_axis", call)
        return moved._replace(operand=rows).then(
            lambda rows: operands.join_rows(rows, concat, where, tiled, call)
        )

    return operands.over_leaves(
        x,
        prepare,
        lambda *xs, op: bind(*xs, where=where, how=how),
        collective="all_to_all",
        call=call,
        where=where,
        how=how,
        by_lax=lambda x, op, where: _by_lax(x, where=where),
    )


def bind(*xs: Any, where: Where, how: How) -> Sequence[Any]:
    """Of operands (p, *s) on p ranks: row d goes to rank d, row s of a result comes from rank s."""
    xs = tuple(axes.cast_varying(x, where.checked) for x in xs)
    return all_to_all_p.bind(*xs, where=where, how=how)


def _by_lax(x: Any, *, where: Where) -> Any:
    return lax.all_to_all(x, where.axes, 0, 0, axis_index_groups=where.groups, tiled=True)


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    strong = [aval.update(weak_type=False) for aval in avals]
    return [axes.varying_result(aval, where) for aval in strong], axes.effects(where)


def _lower(ctx: Any, *values: Any, where: Where, how: How) -> Sequence[Any]:
    return calls.lower(ctx, values, "all_to_all", where, how)


def _batch(axis_data: Any, xs: Any, dims: Any, *, where: Where, how: How) -> Any:
    if axis_data.name not in where.axes:
        xs, dims = operands.behind_rows(xs, dims)
        return bind(*xs, where=where, how=how), dims
    size = axis_data.size
    before, after = axes.around(where, axis_data.name, calls.describe("all_to_all", how.name))
    rest = where.without(axis_data.name)

    def by_others(x: Any, d: int | None) -> Any:  # (destination along the others, from, to, *s)
        x = operands.batch_in_front(x, d, size)
        s = range(4, x.ndim + 2)
        x = x.reshape(size, before, size, after, *x.shape[2:]).transpose(1, 3, 0, 2, *s)
        return x.reshape(before * after, size, size, *x.shape[4:])

    def by_rank(y: Any) -> Any:  # (to, source along all axes, *s)
        s = range(4, y.ndim + 1)
        y = y.reshape(before, after, size, size, *y.shape[3:]).transpose(3, 0, 2, 1, *s)
        return y.reshape(size, before * size * after, *y.shape[4:])

    rows = [by_others(x, d) for x, d in zip(xs, dims, strict=True)]
    rows = bind(*rows, where=rest, how=how) if rest.axes else rows
    return [by_rank(y) for y in rows], [0] * len(xs)


def _jvp(primals: Any, tangents: Any, *, where: Where, how: How) -> Any:
    return primitive.jvp_of_linear(lambda *xs: bind(*xs, where=where, how=how), primals, tangents)


def _transpose(cotangents: Any, *xs: Any, where: Where, how: How) -> Any:
    return primitive.transpose_of_linear(
        lambda *cts: bind(*cts, where=where, how=how), cotangents, xs
    )


all_to_all_p = primitive.define(
    "all_to_all",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("all_to_all", _by_lax),
)

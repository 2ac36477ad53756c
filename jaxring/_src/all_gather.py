"""all_gather: every rank gets all ranks' operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxring._src import axes, calls, operands, primitive
from jaxring._src.axes import Where
from jaxring._src.calls import How
from jaxring.errors import UsageError

_TYPES = ("varying", "invarying", "reduced")


def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    algorithm: str = "auto",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    name: str | None = None,
) -> Any:
    """Gathers `x` of all ranks of an axis or communicator on every rank, in rank order.

    With `jax.lax.all_gather`'s signature and results. The ring algorithm is the second half of the
    ring allreduce (Patarasuk & Yuan 2009): each rank sends its operand p - 1 times around.

    Args:
      x: an array or a pytree of arrays; PRNG keys, too. Leaves of one dtype travel in one
        operation, or in several of at most the setting `bucket_bytes`.
      axis_name: a bound axis name, a tuple of them (mesh axes and vmap axes may mix), or a
        `jaxring.Communicator`.
      axis: the dimension of the result along which the ranks lie.
      tiled: False for a new dimension, with one element for each rank; True to concatenate along
        one that `x` has.
      to: under check_vma=True the type of the result over the axis: "varying", "invarying" (equal
        on all ranks) or "reduced". Without types, as in communicator mode, it says nothing.
      algorithm: "auto" or a name that `jaxring info` lists for all_gather.
      axis_index_groups: disjoint lists of axis indices, equally long, that cover the axis; each
        list gathers for itself, in its own order. With to="varying" only.
      name: appears in errors, timeline and profiler.

    Returns:
      The structure and dtypes of `x`. On p ranks there is a new dimension of size p, or one of size
      n becomes n * p.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: the transpose is the reduce_scatter of a sum; with to="invarying", whose cotangents
    are equal on all ranks, each rank takes its part of its own.

    Example, on 4 devices; `table` is [0, 1, 2, 3] on each:

        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda: jaxring.all_gather(jaxring.axis_index("dp"), "dp", to="invarying")
        table = jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P())()
    """
    call = calls.describe("all_gather", name)
    where = axes.resolve(axis_name, axis_index_groups, call, groups_typed=to == "varying")
    how = calls.how(algorithm, name, call, "all_gather", op="")
    to = _checked_type(to, where, call)
    axes.group_size(where, call)

    def prepare(leaf: Any) -> operands.Leaf:
        dimension = operands.check_axis(axis, jnp.ndim(leaf) + (not tiled), "axis", call)
        moved = operands.movable(leaf, call)
        return moved.then(lambda rows: operands.join_rows(rows, dimension, where, tiled, call))

    return operands.over_leaves(
        x,
        prepare,
        lambda *xs, op: bind(*xs, to=to, where=where, how=how),
        collective="all_gather",
        call=call,
        where=where,
        how=how,
        by_lax=lambda x, op, where: _by_lax(x, to=to, where=where),
    )


def _checked_type(to: str, where: Where, call: str) -> str:
    if to not in _TYPES:
        raise UsageError(f"{call}: unknown to={to!r}; use {calls.one_of(_TYPES)}")
    if to != "varying" and where.groups is not None:
        raise UsageError(
            f"{call}: with axis_index_groups the result differs between groups, so it cannot be"
            f" {to}; leave `to` out"
        )
    if to == "reduced" and where.checked and where.checked != where.axes:
        raise UsageError(
            f"{call}: to='reduced' does not go with vmap axes; name the mesh axes"
            f" {where.checked} alone"
        )
    return to if where.checked else "varying"  # without types, there is nothing to say


def bind(*xs: Any, to: str, where: Where, how: How) -> Sequence[Any]:
    """Of operands (*s): (p, *s) on each of p ranks."""
    xs = tuple(axes.cast_varying(x, where.checked) for x in xs)
    return all_gather_p.bind(*xs, to=to, where=where, how=how)


def _by_lax(x: Any, *, to: str, where: Where) -> Any:
    return lax.all_gather(x, where.axes, axis_index_groups=where.groups, to=to)


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, to: str, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    size = axes.group_size(where, calls.describe("all_gather", how.name))

    def typed(aval: Any) -> Any:
        rows = axes.varying_result(axes.with_rows(aval, size), where)
        return rows if to == "varying" else axes.equal_result(rows, where, reduced=to == "reduced")

    return [typed(aval) for aval in avals], axes.effects(where)


def _lower(ctx: Any, *values: Any, to: str, where: Where, how: How) -> Sequence[Any]:
    alone = lambda x: x[None]  # noqa: E731
    return calls.lower(ctx, values, "all_gather", where, how, alone=alone)


def _batch(axis_data: Any, xs: Any, dims: Any, *, to: str, where: Where, how: How) -> Any:
    if axis_data.name not in where.axes:
        dims_out = [None if d is None else d + 1 for d in dims]
        return bind(*xs, to=to, where=where, how=how), dims_out
    before, after = axes.around(where, axis_data.name, calls.describe("all_gather", how.name))
    rest = where.without(axis_data.name)
    rows = [operands.batch_in_front(x, d, axis_data.size) for x, d in zip(xs, dims, strict=True)]
    rows = bind(*rows, to=to, where=rest, how=how) if rest.axes else [x[None] for x in rows]

    def by_rank(y: Any) -> Any:  # from (ranks along the other axes, batch, *s)
        y = y.reshape(before, after, axis_data.size, *y.shape[2:])
        return jnp.swapaxes(y, 1, 2).reshape(before * axis_data.size * after, *y.shape[3:])

    return [by_rank(y) for y in rows], [None] * len(xs)


def _jvp(primals: Any, tangents: Any, *, to: str, where: Where, how: How) -> Any:
    return primitive.jvp_of_linear(
        lambda *xs: bind(*xs, to=to, where=where, how=how), primals, tangents
    )


def _transpose(cotangents: Any, *xs: Any, to: str, where: Where, how: How) -> Any:
    """Over axes of which types say that the result is equal, each rank takes its own part."""
    equal = where.checked if to == "invarying" else ()
    rest = where.without(*equal)

    def scatter(*cotangents: Any) -> Sequence[Any]:
        cts: Sequence[Any] = [_own_rows(ct, where, equal) if equal else ct for ct in cotangents]
        if equal and not rest.axes:
            return [ct[0] for ct in cts]
        if to != "reduced":
            cts = [axes.cast_varying(ct, where.checked) for ct in cts]
        return primitive.bind("reduce_scatter", *cts, op="sum", where=rest, how=how)

    return primitive.transpose_of_linear(scatter, cotangents, xs)


def _own_rows(rows: Any, where: Where, part: Sequence[Any]) -> Any:
    """Those of the rows of all ranks that have this rank's place along the axes `part`."""
    sizes = [lax.axis_size(axis) for axis in where.axes]
    places = [where.axes.index(axis) for axis in part]
    y = jnp.moveaxis(rows.reshape(*sizes, *rows.shape[1:]), places, range(len(places)))
    y = y.reshape(lax.axis_size(tuple(part)), -1, *rows.shape[1:])
    return lax.dynamic_index_in_dim(y, lax.axis_index(tuple(part)), keepdims=False)


all_gather_p = primitive.define(
    "all_gather",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("all_gather", _by_lax),
)

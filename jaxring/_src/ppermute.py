"""ppermute: ranks send their operands to each other by a permutation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxring._src import axes, calls, custom_call, operands, primitive
from jaxring._src.axes import Where
from jaxring._src.calls import How
from jaxring.errors import UsageError

Pairs = tuple[tuple[int, int], ...]


def ppermute(
    x: Any, axis_name: Any, perm: Sequence[tuple[int, int]], *, name: str | None = None
) -> Any:
    """Sends `x` of ranks of an axis or communicator to others; each sends and gets one at most.

    With `jax.lax.ppermute`'s signature and results.

    Args:
      x: an array or a pytree of arrays of any shapes; PRNG keys, too. Leaves of one dtype travel in
        one operation, or in several of at most the setting `bucket_bytes`.
      axis_name: a bound axis name, a tuple of them (mesh axes; a vmap axis stands alone), or a
        `jaxring.Communicator`. Ranks are numbered as by axis_index(axis_name), the last name
        fastest; jax.lax 0.10 numbers them by the mesh's order instead, later ones refuse another.
      perm: pairs (rank that sends, rank that it sends to). Negative ranks count from the end.
      name: appears in errors, timeline and profiler.

    Returns:
      The structure of `x`, with its shapes and dtypes: what was sent to this rank, or zeros if
      nothing was. Under check_vma=True the result varies over the axis.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: the transpose is the ppermute back.

    Example, on 4 devices; `shifted` is [3, 0, 1, 2]:

        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda x: jaxring.ppermute(x, "dp", [(i, (i + 1) % 4) for i in range(4)])
        shifted = jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(jnp.arange(4))
    """
    return of_pytree(x, axis_name, perm, name, calls.describe("ppermute", name))


def of_pytree(x: Any, axis_name: Any, perm: Any, name: str | None, call: str) -> Any:
    """ppermute under any public name; `call` begins the error messages."""
    where = axes.resolve(axis_name, None, call)
    how = calls.how("auto", name, call, "ppermute", op="")
    pairs = _check_pairs(perm, axes.group_size(where, call), call)
    return operands.over_leaves(
        x,
        lambda leaf: operands.movable(leaf, call),
        lambda *xs, op: bind(*xs, perm=pairs, where=where, how=how),
        collective="ppermute",
        call=call,
        where=where,
        how=how,
        by_lax=lambda x, op, where: _by_lax(x, perm=pairs, where=where),
    )


def _check_pairs(perm: Any, size: int, call: str) -> Pairs:
    try:
        pairs = tuple((operator.index(source), operator.index(to)) for source, to in perm)
    except (TypeError, ValueError):
        raise UsageError(
            f"{call}: perm must be pairs of integers (rank that sends, rank that it sends to), got"
            f" {perm!r}"
        ) from None
    for number in (i for pair in pairs for i in pair if not -size <= i < size):
        raise UsageError(
            f"{call}: perm names rank {number}, but there are {size}; use 0..{size - 1}"
        )
    pairs = tuple((source % size, to % size) for source, to in pairs)
    for side, what in enumerate(("sources", "destinations")):
        ranks = [pair[side] for pair in pairs]
        if twice := sorted({i for i in ranks if ranks.count(i) > 1}):
            raise UsageError(
                f"{call}: the {what} of perm must differ, but rank {twice[0]} is there"
                f" {ranks.count(twice[0])} times; name each rank once on each side"
            )
    return pairs


def bind(*xs: Any, perm: Pairs, where: Where, how: How) -> Sequence[Any]:
    xs = tuple(axes.cast_varying(x, where.checked) for x in xs)
    return ppermute_p.bind(*xs, perm=perm, where=where, how=how)


def _by_lax(x: Any, *, perm: Pairs, where: Where) -> Any:
    return lax.ppermute(x, where.axes, perm)


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, perm: Pairs, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    return [axes.varying_result(aval, where) for aval in avals], axes.effects(where)


def _lower(ctx: Any, *values: Any, perm: Pairs, where: Where, how: How) -> Sequence[Any]:
    groups = custom_call.groups_of(ctx, where, calls.describe("ppermute", how.name))
    size = len(groups[0]) if groups else where.world_size
    to = dict(perm)
    return calls.lower(
        ctx,
        values,
        "ppermute",
        where,
        how,
        permutation=[to.get(i, -1) for i in range(size)],
        alone=lambda x: x if perm else jnp.zeros_like(x),
    )


def _batch(axis_data: Any, xs: Any, dims: Any, *, perm: Pairs, where: Where, how: How) -> Any:
    if axis_data.name not in where.axes:
        return bind(*xs, perm=perm, where=where, how=how), dims
    if len(where.axes) > 1:
        raise UsageError(
            f"{calls.describe('ppermute', how.name)}: the vmap axis {axis_data.name!r} cannot be"
            f" permuted together with others, {where.axes}; name it alone"
        )
    sources, got = np.zeros(axis_data.size, int), np.zeros(axis_data.size, bool)
    for source, to in perm:
        sources[to], got[to] = source, True

    def permuted(x: Any, d: int | None) -> Any:
        y = operands.batch_in_front(x, d, axis_data.size)[sources]
        return jnp.where(got.reshape(-1, *[1] * (y.ndim - 1)), y, np.zeros((), y.dtype))

    return [permuted(x, d) for x, d in zip(xs, dims, strict=True)], [0] * len(xs)


def _jvp(primals: Any, tangents: Any, *, perm: Pairs, where: Where, how: How) -> Any:
    return primitive.jvp_of_linear(
        lambda *xs: bind(*xs, perm=perm, where=where, how=how), primals, tangents
    )


def _transpose(cotangents: Any, *xs: Any, perm: Pairs, where: Where, how: How) -> Any:
    inverse = tuple((to, source) for source, to in perm)
    return primitive.transpose_of_linear(
        lambda *cts: bind(*cts, perm=inverse, where=where, how=how), cotangents, xs
    )


ppermute_p = primitive.define(
    "ppermute",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("ppermute", _by_lax),
)

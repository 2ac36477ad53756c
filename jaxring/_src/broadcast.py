"""broadcast: every rank gets the root's operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxring._src import axes, calls, operands, primitive
from jaxring._src.axes import Where
from jaxring._src.calls import How


def broadcast(x: Any, axis_name: Any, root: int = 0, *, name: str | None = None) -> Any:
    """Gives every rank of an axis or communicator the `x` of rank `root`.

    Every rank reads the root's operand, or it comes down a double binary tree (Sanders, Speck &
    Träff 2009), by message size and topology.

    Args:
      x: an array or a pytree of arrays of any shapes; PRNG keys, too. On ranks other than the root
        only shapes and dtypes count. Leaves of one dtype travel in one operation, or in several of
        at most the setting `bucket_bytes`.
      axis_name: a bound axis name, a tuple of them (mesh axes and vmap axes may mix), or a
        `jaxring.Communicator`.
      root: the rank that is copied; among several axes the last one counts fastest.
      name: appears in errors, timeline and profiler.

    Returns:
      The structure of `x`, with its shapes and dtypes. Under check_vma=True the result does not
      vary over the axis.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: the cotangent flows to the root only. Under check_vma=True it is equal on all ranks,
    and the root takes its own; otherwise and in communicator mode the root gets the sum of all
    ranks' cotangents.

    Example, on 4 devices; `first` is 10 on each:

        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda: jaxring.broadcast(10 + jaxring.axis_index("dp"), "dp")
        first = jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P())()
    """
    call = calls.describe("broadcast", name)
    return of_pytree(x, axis_name, root, "root", "invarying", name, call)


def of_pytree(
    x: Any, axis_name: Any, root: Any, argument: str, to: str, name: str | None, call: str
) -> Any:
    """broadcast under any public name; `call` begins the error messages.

    Args:
      argument: what `root` is called there.
      to: the type of the result, "invarying" or "varying".
    """
    where = axes.resolve(axis_name, None, call)
    how = calls.how("auto", name, call, "broadcast", op="")
    rank, where = axes.check_rank(root, where, argument, call), where.unsized()
    return operands.over_leaves(
        x,
        lambda leaf: operands.movable(leaf, call),
        lambda *xs, op: bind(*xs, root=rank, to=to, where=where, how=how),
        collective="broadcast",
        call=call,
        where=where,
        how=how,
        by_lax=lambda x, op, where: _by_lax(x, root=rank, to=to, where=where),
    )


def bind(*xs: Any, root: int, to: str, where: Where, how: How) -> Sequence[Any]:
    xs = tuple(axes.cast_varying(x, where.checked) for x in xs)
    return broadcast_p.bind(*xs, root=root, to=to, where=where, how=how)


def _by_lax(x: Any, *, root: int, to: str, where: Where) -> Any:
    masked = jnp.where(axes.rank(where) == root, x, jnp.zeros_like(x))
    y = lax.psum(masked, where.axes).astype(x.dtype)
    return y if to == "invarying" else axes.cast_varying(y, where.checked)


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(
    *avals: Any, root: int, to: str, where: Where, how: How
) -> tuple[list[Any], set[Any]]:
    typed = [axes.varying_result(aval, where) for aval in avals]
    if to == "invarying":
        typed = [axes.equal_result(aval, where) for aval in typed]
    return typed, axes.effects(where)


def _lower(ctx: Any, *values: Any, root: int, to: str, where: Where, how: How) -> Sequence[Any]:
    return calls.lower(ctx, values, "broadcast", where, how, root=root)


def _batch(
    axis_data: Any, xs: Any, dims: Any, *, root: int, to: str, where: Where, how: How
) -> Any:
    if axis_data.name not in where.axes:
        return bind(*xs, root=root, to=to, where=where, how=how), dims
    own, others = axes.split_rank(root, where, (axis_data.name,))
    rest = where.without(axis_data.name)
    chosen = [
        x if d is None else lax.index_in_dim(x, own, d, keepdims=False)
        for x, d in zip(xs, dims, strict=True)
    ]
    if rest.axes:
        chosen = bind(*chosen, root=others, to=to, where=rest, how=how)
    return chosen, [None] * len(xs)


def _jvp(primals: Any, tangents: Any, *, root: int, to: str, where: Where, how: How) -> Any:
    return primitive.jvp_of_linear(
        lambda *xs: bind(*xs, root=root, to=to, where=where, how=how), primals, tangents
    )


def _transpose(cotangents: Any, *xs: Any, root: int, to: str, where: Where, how: How) -> Any:
    """Over axes of which types say that the result is equal, the root takes its own cotangent."""
    equal = where.checked if to == "invarying" else ()
    rest = where.without(*equal)

    def to_root(*cotangents: Any) -> Sequence[Any]:
        cts: Sequence[Any] = [axes.cast_varying(ct, where.checked) for ct in cotangents]
        own, others = (0, root) if where.communicator else axes.split_rank(root, where, equal)
        if rest.axes or where.communicator:
            cts = primitive.bind("reduce", *cts, op="sum", root=others, where=rest, how=how)
        if not equal:
            return cts
        here = lax.axis_index(equal) == own
        return [jnp.where(here, ct, np.zeros((), ct.dtype)) for ct in cts]

    return primitive.transpose_of_linear(to_root, cotangents, xs)


broadcast_p = primitive.define(
    "broadcast",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("broadcast", _by_lax),
)

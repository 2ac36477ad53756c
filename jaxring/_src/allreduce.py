"""allreduce: every rank gets the reduction of all ranks' operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxring._src import axes, calls, operands, partial_sums, primitive, reductions
from jaxring._src.axes import Where
from jaxring._src.calls import How
from jaxring.errors import UsageError


def allreduce(
    x: Any,
    axis_name: Any,
    op: str = "sum",
    *,
    algorithm: str = "auto",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    name: str | None = None,
) -> Any:
    """Reduces `x` over all ranks of an axis or communicator; every rank gets the result.

    Args:
      x: an array or a pytree of arrays of any shapes. Leaves of one dtype travel in one operation,
        or in several of at most the setting `bucket_bytes`. Python scalars and constants fold at
        trace time on axes, as in lax.
      axis_name: a bound axis name, a tuple of them (mesh axes and vmap axes may mix), or a
        `jaxring.Communicator`.
      op: "sum", "mean", "prod", "min", "max", or for bool also "and", "or". NaN anywhere gives NaN
        for min and max.
      algorithm: "auto" or a name that `jaxring info` lists.
      axis_index_groups: disjoint lists of axis indices, of any sizes, that cover the axis; each
        list reduces for itself. Not under check_vma=True.
      name: appears in errors, timeline and profiler.

    Returns:
      The structure of `x`, with its shapes. Dtypes are those of `x`, except that mean gives float32
      for integers and bool, and sum and prod give int32 for bool. Under check_vma=True the result
      does not vary over the axis.

    Raises:
      UsageError (a ValueError): an argument that cannot work; the text says what can.
      UnboundAxisError (also a NameError): a name that is not bound.

    Derivative: that of lax.psum for sum and mean, also in communicator mode; for min and max the
    tangent is split evenly over ties; prod differentiates also at zeros.

    Example, on 4 devices; `total` is the sum of the 4 rows:

        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda row: jaxring.allreduce(row, "dp")
        total = jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P())(jnp.eye(4))
    """
    call = calls.describe("allreduce", name)
    return of_pytree(x, axis_name, op, algorithm, axis_index_groups, name, call)


def of_pytree(
    x: Any,
    axis_name: Any,
    op: str,
    algorithm: str,
    axis_index_groups: Any,
    name: str | None,
    call: str,
    of_constant: Callable[..., Any] = reductions.of_constant,
    overlaps: bool = False,
) -> Any:
    """allreduce under any public name; `call` begins the error messages.

    Args:
      overlaps: as of `How`.
    """
    reductions.check_op(op, call)
    where = axes.resolve(axis_name, axis_index_groups, call).unsized()
    how = calls.how(algorithm, name, call, "allreduce", op)
    how = dataclasses.replace(how, overlaps=overlaps)
    leaves, structure = jax.tree.flatten(x)
    if not (leaves and (where.axes or where.communicator)):
        return x
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    results, rest = list(leaves), []
    with jax.named_scope(name or "jaxring.allreduce"):
        for i, leaf in enumerate(leaves):
            if getattr(leaf, "dtype", None) == jax.dtypes.float0:
                continue  # the gradient of an integer, which has no value
            if not _folds(leaf, where):
                rest.append(i)
                continue
            reductions.kind(jnp.result_type(leaf), op, call)
            folded = of_constant(leaf, op, where)
            results[i] = jnp.asarray(folded) if traced else folded
        prepared = [reductions.prepare(leaves[i], op, call) for i in rest]
        varying = _varying([x for x, _ in prepared], op, where, call)
        reduced = reduce_operands(varying, [o for _, o in prepared], where, how, call)
        for i, y in zip(rest, reduced, strict=True):
            results[i] = y
    return jax.tree.unflatten(structure, results)


def _folds(leaf: Any, where: Where) -> bool:
    """Whether every rank is known to have this value; in communicator mode the world may grow."""
    if where.communicator or isinstance(leaf, Tracer):
        return False
    return len(axes.group_sizes(where)) == 1


def _varying(xs: list[Any], op: str, where: Where, call: str) -> list[Any]:
    """Types the operands as varying over the axes; one that is equal on all ranks warns."""
    if not where.checked:
        return xs
    checked = set(where.checked)
    xs = [partial_sums.as_terms(x, op, where, call) for x in xs]
    for x in xs:
        found = axes.varying_axes(x) & checked
        if found and found != checked:
            raise UsageError(
                f"{call}: the operand varies over {sorted(map(str, found))} of the axes"
                f" {where.checked} only; reduce over these, or apply"
                f" jax.lax.pcast(x, {tuple(checked - found)}, to='varying') first"
            )
    size = lax.axis_size(where.checked)
    if (
        size > 1
        and op in ("sum", "mean", "prod")
        and not all(axes.varying_axes(x) & checked for x in xs)
    ):
        effect = {
            "sum": f"the sum is {size} times it",
            "mean": "the mean is itself",
            "prod": f"the product is its power of {size}",
        }[op]
        calls.warn_once(
            f"{call}: an operand is already equal on all ranks of {where.checked} (under"
            " check_vma=True, AD sums the gradients of replicated parameters), so that"
            f" {effect}, as in jax.lax; for gradients, apply jaxring.reduce_gradients_of to the"
            " parameters instead"
        )
    return [axes.cast_varying(x, where.checked) for x in xs]


def reduce_operands(
    xs: Sequence[Any], ops: Sequence[str], where: Where, how: How, call: str
) -> list[Any]:
    """Binds the primitive once for each op, dtype and bucket. Operands are prepared and varying."""
    return operands.fused(
        lambda *xs, op: bind(*xs, op=op, where=where, how=how),
        xs,
        ops,
        call=call,
        where=where,
        how=how,
        by_lax=reductions.by_lax,
    )


def bind(*xs: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    return allreduce_p.bind(*xs, op=op, where=where, how=how)


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, op: str, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    results = [axes.equal_result(aval, where) for aval in avals]
    if not where.checked:  # as in lax
        results = [aval.update(weak_type=False) for aval in results]
    return results, axes.effects(where)


def _lower(ctx: Any, *values: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    return calls.lower(ctx, values, "allreduce", where, how, op=op)


def _batch(axis_data: Any, xs: Any, dims: Any, *, op: str, where: Where, how: How) -> Any:
    if axis_data.name not in where.axes:
        return bind(*xs, op=op, where=where, how=how), dims
    if where.groups is not None:
        return reductions.batch_groups(axis_data, xs, dims, op, where, how)
    rest = where.without(axis_data.name)
    wide = [reductions.over_batch(x, d, op, axis_data.size) for x, d in zip(xs, dims, strict=True)]
    if rest.axes:
        wide = bind(*wide, op=op, where=rest, how=how)
    return [y.astype(x.dtype) for x, y in zip(xs, wide, strict=True)], [None] * len(xs)


def _jvp(primals: Any, tangents: Any, *, op: str, where: Where, how: How) -> Any:
    def reduce(*xs: Any, op: str) -> Sequence[Any]:
        xs = tuple(axes.cast_varying(x, where.checked) for x in xs)
        return bind(*xs, op=op, where=where, how=how)

    return reductions.jvp(primals, tangents, op, reduce)


def _transpose(cotangents: Any, *operands: Any, op: str, where: Where, how: How) -> Any:
    """As lax.psum's: over axes that types track, cotangents are equal and only need the type."""
    reductions.check_transposable(op, "allreduce", how.name)
    rest = where.unchecked()

    def transposed(*cts: Any) -> list[Any]:
        if where.checked and op == "mean":
            cts = tuple(ct / lax.axis_size(where.checked) for ct in cts)
        results = [axes.cast_varying(ct, where.checked) for ct in cts]
        if not where.checked or rest.axes:
            results = list(bind(*results, op=op, where=rest, how=how))
        return results

    return primitive.transpose_of_linear(transposed, cotangents, operands)


allreduce_p = primitive.define(
    "allreduce",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=calls.without_backend("allreduce", reductions.by_lax),
)

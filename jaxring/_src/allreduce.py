"""allreduce: every rank gets the reduction of all ranks' operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.interpreters import ad, mlir

from jaxring._src import axes, buckets, calls, primitive, reductions
from jaxring._src.axes import Where
from jaxring._src.calls import How
from jaxring.config import config
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
    reductions.check_op(op, call)
    where = axes.resolve(axis_name, axis_index_groups, call)
    how = calls.how(algorithm, name, call)
    leaves, structure = jax.tree.flatten(x)
    if not (leaves and (where.axes or where.communicator)):
        return x
    with jax.named_scope(name or "jaxring.allreduce"):
        return jax.tree.unflatten(structure, _allreduce_leaves(leaves, op, where, how, call))


def _allreduce_leaves(leaves: list[Any], op: str, where: Where, how: How, call: str) -> list[Any]:
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    results, rest = list(leaves), []
    for i, leaf in enumerate(leaves):
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            continue  # the gradient of an integer, which has no value
        if not _folds(leaf, where):
            rest.append(i)
            continue
        reductions.kind(jnp.result_type(leaf), op, call)
        folded = reductions.of_constant(leaf, op, where)
        results[i] = jnp.asarray(folded) if traced else folded
    prepared = [reductions.prepare(leaves[i], op, call) for i in rest]
    operands = _varying([x for x, _ in prepared], op, where, call)
    reduced = reduce_operands(operands, [o for _, o in prepared], where, how, call)
    for i, y in zip(rest, reduced, strict=True):
        results[i] = y
    return results


def _folds(leaf: Any, where: Where) -> bool:
    """Whether every rank is known to have this value; in communicator mode the world may grow."""
    if where.communicator or isinstance(leaf, Tracer):
        return False
    return len(axes.group_sizes(where)) == 1


def _varying(operands: list[Any], op: str, where: Where, call: str) -> list[Any]:
    """Types the operands as varying over the axes; one that is equal on all ranks warns."""
    if not where.checked:
        return operands
    checked = set(where.checked)
    for x in operands:
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
        and not all(axes.varying_axes(x) & checked for x in operands)
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
    return [axes.cast_varying(x, where.checked) for x in operands]


def served_by_lax(where: Where, how: How, call: str) -> bool:
    """Whether lax must serve the call because XLA partitions some mesh axes itself.

    Raises:
      UsageError: so it is, and the setting `fallback` does not allow it.
    """
    auto, _ = axes.other_axes(where)
    if not auto:
        return False
    problem = f"{call}: XLA partitions the Auto mesh axes {auto} and would gather the operand"
    if not how.fallback:
        raise UsageError(
            f"{problem}; let jax.shard_map make all axes manual, make these Explicit"
            " (jax.make_mesh's axis_types), or set"
            ' jaxring.config.update("fallback", "lax")'
        )
    calls.warn_once(f"{problem}; jax.lax reduces instead")
    return True


def reduce_operands(
    operands: Sequence[Any], ops: Sequence[str], where: Where, how: How, call: str
) -> list[Any]:
    """Binds the primitive once for each op, dtype and bucket. Operands are prepared and varying."""
    if served_by_lax(where, how, call):
        return [reductions.by_lax(x, op, where) for x, op in zip(operands, ops, strict=True)]
    kinds = [(op, x.dtype) for op, x in zip(ops, operands, strict=True)]
    sizes_bytes = [buckets.size_bytes(x) for x in operands]
    results: list[Any] = list(operands)
    for bucket in buckets.pack(kinds, sizes_bytes, config.bucket_bytes):
        ys = axes.over_explicit_axes(
            lambda *xs, op=ops[bucket[0]]: bind(*xs, op=op, where=where, how=how),
            [operands[i] for i in bucket],
            where,
        )
        for i, y in zip(bucket, ys, strict=True):
            results[i] = y
    return results


def bind(*xs: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    return allreduce_p.bind(*xs, op=op, where=where, how=how)


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, op: str, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    typed = [axes.invariant_result(aval, where) for aval in avals]
    return [aval for aval, _ in typed], set().union(*(effects for _, effects in typed))


def _lower(ctx: Any, *values: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    groups = primitive.groups_of(ctx, where, calls.describe("allreduce", how.name))
    if groups and max(len(g) for g in groups) == 1:
        return values
    size_bytes = sum(buckets.size_bytes(aval) for aval in ctx.avals_in)
    return primitive.emit(
        ctx,
        values,
        collective="allreduce",
        op=op,
        algorithm=how.algorithm_for(size_bytes),
        groups=groups,
        where=where,
        how=how,
    )


def _without_backend(ctx: Any, *values: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
    problem = f"{calls.describe('allreduce', how.name)}: jaxring has no backend for {platforms}"
    if not how.fallback or where.communicator:
        raise UsageError(
            f"{problem}; it has one for {', '.join(primitive.PLATFORMS)}; compute there, or on a"
            ' mesh set jaxring.config.update("fallback", "lax")'
        )
    calls.warn_once(f"{problem}; jax.lax reduces instead")
    return mlir.lower_fun(lambda *xs: [reductions.by_lax(x, op, where) for x in xs])(ctx, *values)


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
    def linear(*xs: Any, op: str = op) -> Sequence[Any]:
        return bind(*xs, op=op, where=where, how=how)

    if op in ("sum", "mean"):
        return primitive.jvp_of_linear(linear, primals, tangents)
    results = linear(*primals)

    def tangents_of(*live: int) -> Sequence[Any]:
        weights = reductions.weights(
            op,
            [primals[i] for i in live],
            [results[i] for i in live],
            lambda xs, op: linear(*(axes.cast_varying(x, where.checked) for x in xs), op=op),
        )
        products = [tangents[i] * w for i, w in zip(live, weights, strict=True)]
        return linear(*(axes.cast_varying(x, where.checked) for x in products), op="sum")

    live = [type(t) is not ad.Zero for t in tangents]
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
    return results, primitive.on_live(tangents_of, range(len(primals)), live, zeros)


def _transpose(cotangents: Any, *operands: Any, op: str, where: Where, how: How) -> Any:
    """As lax.psum's: over axes that types track, cotangents are equal and only need the type."""
    if op not in ("sum", "mean"):
        call = calls.describe("allreduce", how.name)
        raise UsageError(f"{call}: op {op!r} is not linear, so it has no transpose")
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
    "jaxring_allreduce",
    abstract_eval=_abstract_eval,
    lower=_lower,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    without_backend=_without_backend,
)

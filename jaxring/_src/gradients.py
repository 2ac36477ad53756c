"""reduce_gradients_of, an identity whose backward pass reduces the gradients; and the check that AD
has not reduced them already."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxring._src import allreduce, axes, buckets, calls, primitive, reductions
from jaxring._src.axes import Where
from jaxring._src.calls import How
from jaxring.config import config
from jaxring.errors import UsageError


def reduce_gradients_of(
    params: Any,
    axis_name: Any,
    op: str = "mean",
    *,
    algorithm: str = "auto",
    name: str | None = None,
) -> Any:
    """Returns `params`; in the backward pass their cotangents are allreduced, in buckets.

    Apply it to the replicated parameters inside shard_map (or in communicator mode), where the loss
    is computed:

        def loss(params, batch):
            params = jaxring.reduce_gradients_of(params, "dp")
            return jnp.mean((model(params, batch.x) - batch.y) ** 2)
        grads = jax.grad(loss)(params, batch)  # of the mean over all ranks' batches

    Args:
      params: a pytree of arrays. Leaves that are not floating or complex pass unchanged.
      axis_name: a bound axis name, a tuple of them, or a `jaxring.Communicator`.
      op: "mean" when each rank differentiates the mean over its local batch; "sum" when it
        differentiates a local sum, or a loss that is divided by the number of ranks already (under
        check_vma=True such as lax.pmean gives).
      algorithm: as for `jaxring.allreduce`.
      name: appears in errors, timeline and profiler.

    Returns:
      `params`, under check_vma=True typed as varying over the axis, so that AD does not sum their
      gradients again. Each bucket of at most the setting `bucket_bytes` is one operation; the last
      leaves' bucket comes first.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.allreduce`; also for another op.

    Derivative: forward mode gives the identity's. Take the gradient inside shard_map, or under
    check_vma=True also outside; outside with check_vma=False shard_map itself sums once more.
    """
    call = calls.describe("reduce_gradients_of", name)
    if op not in ("mean", "sum"):
        raise UsageError(f"{call}: op {op!r} is not linear; use mean or sum")
    where = axes.resolve(axis_name, None, call)
    how = dataclasses.replace(calls.how(algorithm, name, call), overlaps=True)
    calls.served_by_lax(where, how, call)  # raises here rather than in the backward pass
    leaves, structure = jax.tree.flatten(params)
    marked = [i for i, leaf in enumerate(leaves) if _has_gradient(leaf)]
    for i in marked:
        reductions.kind(leaves[i].dtype, op, call)
    sizes_bytes = [buckets.size_bytes(leaves[i]) for i in marked]
    kinds = [leaves[i].dtype for i in marked]
    # Bound from the first bucket to the last: the backward pass comes to the last one first.
    for bucket in reversed(buckets.pack_backward(kinds, sizes_bytes, config.bucket_bytes)):
        chosen = [marked[j] for j in bucket]
        results = bind(*(leaves[i] for i in chosen), op=op, where=where, how=how)
        for i, y in zip(chosen, results, strict=True):
            leaves[i] = y
    return jax.tree.unflatten(structure, leaves)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def bind(*xs: Any, op: str, where: Where, how: How) -> Sequence[Any]:
    return reduce_gradients_p.bind(*xs, op=op, where=where, how=how)


def check_not_reduced(gradients: Any, where: Where, call: str) -> None:
    """UsageError if types say that a gradient is equal on all ranks (cases.md, 15)."""
    for path, leaf in jax.tree.leaves_with_path(gradients):
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            continue
        kind = jax.typeof(leaf).manual_axis_type
        equal = [a for a in where.checked if a not in kind.varying | kind.unreduced]
        if equal:
            raise UsageError(
                f"{call}: the gradient{jax.tree_util.keystr(path)} is already equal on all ranks of"
                f" {equal}: under check_vma=True, AD sums the gradients of replicated parameters,"
                f" and reducing that sum again would give {lax.axis_size(tuple(equal))} times too"
                f" much; differentiate jax.lax.pcast(params, {tuple(equal)}, to='varying'), or"
                " apply jaxring.reduce_gradients_of to the parameters and leave this"
                " transformation out"
            )


# -- The five rules --------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, op: str, where: Where, how: How) -> tuple[list[Any], set[Any]]:
    return [axes.varying_result(aval, where) for aval in avals], set()


def _batch(axis_data: Any, xs: Any, dims: Any, *, op: str, where: Where, how: How) -> Any:
    # Gradients taken inside the vmap never come here; outside, AD sums over the batch by itself.
    return bind(*xs, op=op, where=where.without(axis_data.name), how=how), dims


def _jvp(primals: Any, tangents: Any, *, op: str, where: Where, how: How) -> Any:
    return primitive.jvp_of_linear(
        lambda *xs: bind(*xs, op=op, where=where, how=how), primals, tangents
    )


def _transpose(cotangents: Any, *operands: Any, op: str, where: Where, how: How) -> Any:
    def reduce(*cts: Any) -> list[Any]:
        if not (where.axes or where.communicator):
            return list(cts)
        cts = tuple(axes.cast_varying(ct, where.checked) for ct in cts)
        call = calls.describe("reduce_gradients_of", how.name)
        return allreduce.reduce_operands(cts, [op] * len(cts), where, how, call)

    results = primitive.transpose_of_linear(reduce, cotangents, operands)
    return [_typed_like(ct, x) for ct, x in zip(results, operands, strict=True)]


def _typed_like(cotangent: Any, operand: Any) -> Any:
    """The gradient of what varied before the call, as a rank's own parameters do, varies too."""
    if not hasattr(cotangent, "dtype"):
        return cotangent
    return axes.cast_varying(cotangent, tuple(operand.aval.manual_axis_type.varying))


reduce_gradients_p = primitive.define_cast(
    "reduce_gradients",
    abstract_eval=_abstract_eval,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)

"""From the leaves of a pytree to operands of the primitives, and back.

The primitives that gather or scatter have one shape only: with one row for each rank in front. The
public functions cut and join other dimensions around them, in operations that JAX differentiates
and batches itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxring._src import axes, buckets, calls, native_facts, partial_auto
from jaxring._src.axes import Where
from jaxring._src.calls import How
from jaxring.config import config
from jaxring.errors import UsageError


def _same(x: Any) -> Any:
    return x


class Leaf(NamedTuple):
    """A leaf of a pytree on its way.

    Attributes:
      operand: what the primitive takes.
      op: with what it is reduced, or "".
      finish: from the primitive's result to the caller's.
    """

    operand: Any
    op: str = ""
    finish: Callable[[Any], Any] = _same

    def then(self, last: Callable[[Any], Any]) -> Leaf:
        """The same leaf, whose result also goes through `last`."""
        first = self.finish
        return self._replace(finish=lambda y: last(first(y)))


# -- Pytrees ---------------------------------------------------------------------------------------


def over_leaves(
    x: Any,
    prepare: Callable[[Any], Leaf],
    bind: Callable[..., Sequence[Any]],
    *,
    collective: str,
    call: str,
    where: Where,
    how: How,
    by_lax: Callable[..., Any],
) -> Any:
    """A collective of a pytree: `bind` of its prepared leaves, once for each op, dtype and bucket.

    Operands are typed as varying over the axes first, as jax.lax does.

    Args:
      bind: (*operands, op=) -> results.
      by_lax: as for `fused`.
    """
    leaves, structure = jax.tree.flatten(x)
    if not (leaves and (where.axes or where.communicator)):
        return x
    with jax.named_scope(how.name or f"jaxring.{collective}"):
        prepared = [prepare(leaf) for leaf in leaves]
        results = fused(
            bind,
            [axes.cast_varying(leaf.operand, where.checked) for leaf in prepared],
            [leaf.op for leaf in prepared],
            call=call,
            where=where,
            how=how,
            by_lax=by_lax,
        )
        finished = [leaf.finish(y) for leaf, y in zip(prepared, results, strict=True)]
    return jax.tree.unflatten(structure, finished)


def fused(
    bind: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    ops: Sequence[str],
    *,
    call: str,
    where: Where,
    how: How,
    by_lax: Callable[..., Any],
) -> list[Any]:
    """Binds once for each op, dtype and bucket.

    What is reduced is mostly gradients, and the backward pass has those of the last leaves first:
    so the last bucket is bound first, and no call waits for one whose operands come later.

    Args:
      bind: (*operands, op=) -> results.
      by_lax: (operand, op=, where=) -> result, with jax.lax, for meshes that we cannot serve.
    """
    if calls.served_by_lax(where, how, call):
        return [by_lax(x, op=op, where=where) for x, op in zip(operands, ops, strict=True)]
    kinds = [(op, x.dtype) for op, x in zip(ops, operands, strict=True)]
    sizes_bytes = [buckets.size_bytes(x) for x in operands]
    results: list[Any] = list(operands)
    pack = buckets.pack_backward if any(ops) else buckets.pack
    for bucket in pack(kinds, sizes_bytes, config.bucket_bytes):
        ys = bind(*(operands[i] for i in bucket), op=ops[bucket[0]])
        for i, y in zip(bucket, ys, strict=True):
            results[i] = y
    return results


# -- Dtypes of collectives that only move data -----------------------------------------------------


def movable(leaf: Any, call: str) -> Leaf:
    """An operand of any of our dtypes; PRNG keys travel as the integers that they consist of.

    Raises:
      UsageError: the dtype is none of these.
    """
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        # The gradient of an integer, which has no value: only its shape matters.
        return Leaf(
            jnp.zeros(leaf.shape, jnp.bool_), finish=lambda y: np.zeros(y.shape, jax.dtypes.float0)
        )
    x = jnp.asarray(leaf)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        kind = jax.random.key_impl(x)
        return Leaf(jax.random.key_data(x), finish=lambda y: jax.random.wrap_key_data(y, impl=kind))
    dtypes = native_facts.lists()["dtypes"]
    if str(x.dtype) not in dtypes:
        raise UsageError(f"{call}: {x.dtype} cannot be moved; convert to {calls.one_of(dtypes)}")
    return Leaf(x)


# -- Rows ------------------------------------------------------------------------------------------


def check_axis(axis: Any, ndim: int, argument: str, call: str) -> int:
    """`axis` as a number in 0..ndim - 1.

    Raises:
      UsageError: there is no such dimension.
    """
    try:
        number = operator.index(axis)
    except TypeError:
        raise UsageError(f"{call}: {argument} must be an integer, got {axis!r}") from None
    if not -ndim <= number < ndim:
        raise UsageError(
            f"{call}: {argument}={number} names no dimension of {ndim}; pass"
            f" {'an array with more' if ndim == 0 else f'one of 0..{ndim - 1}'}"
        )
    return number % ndim


def cut_rows(x: Any, axis: int, where: Where, tiled: bool, argument: str, call: str) -> Any:
    """One row for each rank in front: parts of dimension `axis` (tiled), or its elements.

    Raises:
      UsageError: the dimension cannot be cut into as many rows as there are ranks.
    """
    ranks, size = axes.group_size(where, call), x.shape[axis]
    partial_auto.check_whole(x, axis, where, call)
    if tiled and size % ranks:
        raise UsageError(
            f"{call}: dimension {axis} has size {size}, not divisible by the number of ranks"
            f" {ranks}; pad x to {-(-size // ranks) * ranks} or pass another {argument}"
        )
    if not tiled and size != ranks:
        raise UsageError(
            f"{call}: dimension {axis} has size {size}, but tiled=False needs one element for each"
            f" of {ranks} ranks; pass tiled=True to cut it into {ranks} parts, or another"
            f" {argument}"
        )
    if tiled:
        x = x.reshape(*x.shape[:axis], ranks, size // ranks, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join_rows(rows: Any, axis: int, where: Where, tiled: bool, call: str) -> Any:
    """The rows as a new dimension `axis`, or (tiled) one after the other in dimension `axis`."""
    y = jnp.moveaxis(rows, 0, axis)
    if not tiled:
        return y
    partial_auto.check_whole(rows, axis, where, call, in_front=1)
    return y.reshape(*y.shape[:axis], y.shape[axis] * y.shape[axis + 1], *y.shape[axis + 2 :])


# -- Batch dimensions ------------------------------------------------------------------------------


def behind_rows(xs: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(operands, batch dimensions), with dimension 0 again that of the rows."""
    moved = [jnp.swapaxes(x, 0, 1) if d == 0 else x for x, d in zip(xs, dims, strict=True)]
    return moved, [1 if d == 0 else d for d in dims]


def batch_in_front(x: Any, dim: int | None, size: int) -> Any:
    """The batch dimension in front; without one, `size` equal values."""
    if dim is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)

"""Drop-ins for jax.lax's collectives, with its signatures and results.

`all_gather`, `all_to_all` and `ppermute` have files of their own and serve as drop-ins as they are.
Beyond lax, `axis_name` may be a `jaxring.Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxring._src import all_to_all, allreduce, broadcast, calls, ppermute, reduce_scatter
from jaxring._src.axes import Where
from jaxring.errors import UsageError

Groups = Sequence[Sequence[int]] | None


def psum(x: Any, axis_name: Any, *, axis_index_groups: Groups = None) -> Any:
    """The sum of all ranks' `x`, on every rank: `jax.lax.psum`, see `jaxring.allreduce`.

    Args:
      x: an array or a pytree of arrays; Python scalars and constants fold on axes, as in lax.
      axis_name: a bound axis name, a tuple of them, or a `jaxring.Communicator`.
      axis_index_groups: lists of axis indices that each sum for themselves.

    Returns:
      The structure, shapes and dtypes of `x`; int32 for bool.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.allreduce`.

    Derivative: that of lax.psum.

    Example: ``total = jaxring.psum(x, "dp")``, inside jax.shard_map over "dp".
    """
    call = calls.describe("psum", None)
    return allreduce.of_pytree(x, axis_name, "sum", "auto", axis_index_groups, None, call)


def pmean(x: Any, axis_name: Any, *, axis_index_groups: Groups = None) -> Any:
    """The mean of all ranks' `x`, on every rank: `jax.lax.pmean`, see `jaxring.allreduce`.

    Args:
      x, axis_name, axis_index_groups: as for `psum`.

    Returns:
      The structure, shapes and dtypes of `x`; float32 for bool and integers.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.allreduce`.

    Derivative: that of lax.pmean.

    Example: ``grads = jaxring.pmean(grads, "dp")``, inside jax.shard_map over "dp".
    """
    call = calls.describe("pmean", None)
    return allreduce.of_pytree(x, axis_name, "mean", "auto", axis_index_groups, None, call)


def pmax(x: Any, axis_name: Any, *, axis_index_groups: Groups = None) -> Any:
    """The maximum of all ranks' `x`, on every rank: `jax.lax.pmax`, see `jaxring.allreduce`.

    Args:
      x, axis_name, axis_index_groups: as for `psum`.

    Returns:
      The structure, shapes and dtypes of `x`. NaN if any rank has NaN, where lax on CPUs drops it.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.allreduce`.

    Derivative: the tangent, split evenly over ties; lax has none.

    Example: ``largest = jaxring.pmax(x, "dp")``, inside jax.shard_map over "dp".
    """
    call = calls.describe("pmax", None)
    return allreduce.of_pytree(
        x, axis_name, "max", "auto", axis_index_groups, None, call, _as_array
    )


def pmin(x: Any, axis_name: Any, *, axis_index_groups: Groups = None) -> Any:
    """The minimum of all ranks' `x`, on every rank: `jax.lax.pmin`; otherwise as `pmax`.

    Example: ``smallest = jaxring.pmin(x, "dp")``, inside jax.shard_map over "dp".
    """
    call = calls.describe("pmin", None)
    return allreduce.of_pytree(
        x, axis_name, "min", "auto", axis_index_groups, None, call, _as_array
    )


def _as_array(value: Any, op: str, where: Where) -> Any:
    # Weakly typed under check_vma=True only, as in lax.
    return jnp.asarray(value, None if where.checked else jnp.result_type(value))


def psum_scatter(
    x: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """Part r of the sum, on rank r: `jax.lax.psum_scatter`, see `jaxring.reduce_scatter`.

    Args:
      x: an array or a pytree of arrays.
      axis_name, axis_index_groups: as for `psum`; groups must be equally long.
      scatter_dimension: the dimension that is cut.
      tiled: False when it has one element for each rank, and is removed; True to cut it into equal
        parts.

    Returns:
      The structure and dtypes of `x`; int32 for bool.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.reduce_scatter`.

    Derivative: that of lax.psum_scatter, whose transpose is an all_gather.

    Example: ``part = jaxring.psum_scatter(x, "dp", tiled=True)``, inside jax.shard_map over "dp".
    """
    call = calls.describe("psum_scatter", None)
    return reduce_scatter.of_pytree(
        x, axis_name, "sum", scatter_dimension, tiled, "auto", axis_index_groups, None, call
    )


def pbroadcast(x: Any, axis_name: Any, source: int) -> Any:
    """Rank `source`'s `x`, on every rank: `jax.lax.pbroadcast`, on CPUs too.

    Args:
      x: an array or a pytree of arrays.
      axis_name: as for `psum`.
      source: the rank that is copied.

    Returns:
      The structure, shapes and dtypes of `x`. Under check_vma=True it varies over the axis, as
      lax's does; `jaxring.broadcast` gives a result that does not.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.broadcast`.

    Derivative: the source gets the sum of all ranks' cotangents.

    Example: ``first = jaxring.pbroadcast(x, "dp", 0)``, inside jax.shard_map over "dp".
    """
    call = calls.describe("pbroadcast", None)
    return broadcast.of_pytree(x, axis_name, source, "source", "varying", None, call)


def pshuffle(x: Any, axis_name: Any, perm: Sequence[int]) -> Any:
    """Rank ``perm[r]``'s `x`, on rank r: `jax.lax.pshuffle`, see `jaxring.ppermute`.

    Args:
      x: an array or a pytree of arrays.
      axis_name: as for `ppermute`.
      perm: each rank once.

    Returns:
      The structure, shapes and dtypes of `x`.

    Raises:
      UsageError: `perm` is no permutation of the ranks.

    Derivative: the transpose is the shuffle back.

    Example: ``swapped = jaxring.pshuffle(x, "dp", [1, 0])``, inside jax.shard_map over "dp".
    """
    call = calls.describe("pshuffle", None)
    perm = list(perm)
    if set(perm) != set(range(len(perm))):
        raise UsageError(f"{call}: perm must have each of 0..{len(perm) - 1} once, got {perm}")
    return ppermute.of_pytree(
        x, axis_name, list(zip(perm, range(len(perm)), strict=True)), None, call
    )


def pswapaxes(x: Any, axis_name: Any, axis: int, *, axis_index_groups: Groups = None) -> Any:
    """Swaps the ranks with dimension `axis`: `jax.lax.pswapaxes`, see `jaxring.all_to_all`.

    Args:
      x: an array or a pytree of arrays; dimension `axis` has one element for each rank.
      axis_name, axis_index_groups: as for `all_to_all`.

    Returns:
      The structure, shapes and dtypes of `x`.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.all_to_all`.

    Derivative: the transpose is the swap itself.

    Example: ``columns = jaxring.pswapaxes(rows, "dp", 0)``, inside jax.shard_map over "dp".
    """
    call = calls.describe("pswapaxes", None)
    return all_to_all.of_pytree(x, axis_name, axis, axis, False, axis_index_groups, None, call)

"""What each reduction op means: for dtypes, for constants, over a batch axis, and for derivatives.

Shared by the collectives that reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxring._src import axes, calls, native_facts, primitive
from jaxring._src.axes import Where
from jaxring.errors import UsageError

_LOGICAL = ("and", "or")
_ORDERED = ("min", "max")


def check_op(op: Any, call: str) -> None:
    """UsageError for an op that the native list does not have."""
    ops = native_facts.lists()["ops"]
    if op not in ops:
        raise UsageError(f"{call}: unknown op {op!r}; use {calls.one_of(ops)}")


def kind(dtype: Any, op: str, call: str) -> tuple[np.dtype, str]:
    """The dtype in which an operand of `dtype` is reduced, and the op that does it.

    As in lax, the sum of bool is int32 and the mean of integers float32 (of 64-bit ones float64).
    The min of bool is "and".

    Raises:
      UsageError: the op has no meaning for the dtype, or the dtype is none of ours.
    """
    is_bool = dtype == np.bool_
    if op == "mean" and (is_bool or jnp.issubdtype(dtype, jnp.integer)):
        dtype = np.dtype(np.float64 if np.dtype(dtype).itemsize == 8 else np.float32)
    elif op in ("sum", "prod") and is_bool:
        dtype = np.dtype(np.int32)
    elif op in _ORDERED and is_bool:
        op = {"min": "and", "max": "or"}[op]
    dtypes = native_facts.lists()["dtypes"]
    if str(dtype) not in dtypes:
        raise UsageError(f"{call}: {dtype} cannot be reduced; convert to {calls.one_of(dtypes)}")
    if not has_meaning(op, dtype):
        meaningful = [o for o in native_facts.lists()["ops"] if has_meaning(o, dtype)]
        raise UsageError(
            f"{call}: op {op!r} has no meaning for {dtype}; use {calls.one_of(meaningful)}"
        )
    return dtype, op


def prepare(leaf: Any, op: str, call: str) -> tuple[jax.Array, str]:
    """The operand as an array of the dtype to reduce in, and the op that does it (see `kind`)."""
    x = jnp.asarray(leaf)
    dtype, op = kind(x.dtype, op, call)
    return (x if x.dtype == dtype else x.astype(dtype)), op


def has_meaning(op: str, dtype: Any) -> bool:
    if op in _LOGICAL:
        return dtype == np.bool_
    return not (op in _ORDERED and jnp.issubdtype(dtype, jnp.complexfloating))


def of_constant(value: Any, op: str, where: Where) -> Any:
    """The reduction of a value that all ranks hold, with lax's dtypes; nothing is emitted."""
    if op == "sum":
        return lax.psum(value, where.axes, axis_index_groups=where.groups)
    if op == "mean":
        return lax.pmean(value, where.axes, axis_index_groups=where.groups)
    if op == "prod":
        (size,) = axes.group_sizes(where)
        return jnp.asarray(value, np.int32 if jnp.result_type(value) == np.bool_ else None) ** size
    return value


def by_lax(x: Any, *, op: str, where: Where) -> Any:
    """The same reduction by jax.lax (`fallback="lax"`), of a prepared operand."""
    if op in _LOGICAL:
        number = by_lax(x.astype(np.int32), op={"and": "min", "or": "max"}[op], where=where)
        return number.astype(np.bool_)
    functions = {"sum": lax.psum, "mean": lax.pmean, "min": lax.pmin, "max": lax.pmax}
    if op not in functions:
        raise UsageError(
            f"jax.lax has no counterpart of op {op!r}, so fallback='lax' cannot serve it"
        )
    return functions[op](x, where.axes, axis_index_groups=where.groups)


# -- Over a batch axis (a vmap axis that the call names) -------------------------------------------


def over_batch(x: Any, dim: int | None, op: str, size: int) -> Any:
    """Reduces the batch dimension; without one, `size` equal values.

    16- and 8-bit floats come back as float32, so that rounding happens once, after the other axes.
    """
    x = _widened(x)
    if dim is None:
        return x * np.asarray(size, x.dtype) if op == "sum" else x**size if op == "prod" else x
    if op in ("sum", "mean", "prod"):
        f = {"sum": jnp.sum, "mean": jnp.mean, "prod": jnp.prod}[op]
        return f(x, axis=dim, dtype=x.dtype)
    return {"min": jnp.min, "max": jnp.max, "and": jnp.all, "or": jnp.any}[op](x, axis=dim)


def batch_groups(axis_data: Any, xs: Any, dims: Any, op: str, where: Where, how: Any) -> Any:
    """The batching rule for axis_index_groups of the batch axis: each group reduces for itself."""
    groups = where.groups or ()
    if len(where.axes) > 1:
        raise UsageError(
            f"{calls.describe('allreduce', how.name)}: axis_index_groups over a vmap axis together"
            " with other axes have no local meaning; name the vmap axis alone"
        )
    inverse = np.argsort([i for group in groups for i in group])

    def reduce(x: Any, dim: int | None) -> Any:
        full = (axis_data.size, *x.shape)
        x = jnp.broadcast_to(x, full) if dim is None else jnp.moveaxis(x, dim, 0)
        parts = [over_batch(x[np.array(g)], 0, op, len(g)).astype(x.dtype) for g in groups]
        rows = [jnp.broadcast_to(y, (len(g), *y.shape)) for g, y in zip(groups, parts, strict=True)]
        return jnp.concatenate(rows)[inverse]

    return [reduce(x, d) for x, d in zip(xs, dims, strict=True)], [0] * len(xs)


def _widened(x: Any) -> Any:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(np.float32) if narrow else x


# -- Derivatives -----------------------------------------------------------------------------------


def is_linear(op: str) -> bool:
    return op in ("sum", "mean")


def check_transposable(op: str, collective: str, name: str) -> None:
    if not is_linear(op):
        call = calls.describe(collective, name)
        raise UsageError(f"{call}: op {op!r} is not linear, so it has no transpose")


def jvp(
    primals: Any,
    tangents: Any,
    op: str,
    reduce: Callable[..., Sequence[Any]],
    spread: Callable[..., Sequence[Any]] = lambda *ys: ys,
) -> Any:
    """The JVP of a collective that reduces; of min and max it splits the tangent over ties.

    Args:
      reduce: (*operands, op=) -> the collective's results, in one call.
      spread: from results to the reduction of the whole operand on every rank, in one call.
    """
    if is_linear(op):
        return primitive.jvp_of_linear(functools.partial(reduce, op=op), primals, tangents)
    # Else XLA may compute an operand twice, for the collective and for the comparison with its
    # result, and round differently (seen on CPUs without optimization; 0.10 ignores the barrier).
    primals = lax.optimization_barrier(list(primals))
    results = reduce(*primals, op=op)

    def tangents_of(*live: int) -> Sequence[Any]:
        shares = weights(
            op,
            [primals[i] for i in live],
            spread(*(results[i] for i in live)),
            lambda xs, op: spread(*reduce(*xs, op=op)),
        )
        return reduce(*(tangents[i] * w for i, w in zip(live, shares, strict=True)), op="sum")

    live = [type(t) is not ad.Zero for t in tangents]
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
    return results, primitive.on_live(tangents_of, range(len(primals)), live, zeros)


def weights(
    op: str, xs: Sequence[Any], ys: Sequence[Any], reduce: Callable[..., Sequence[Any]]
) -> list[Any]:
    """What each rank's tangents count in the derivative of a min, max or prod.

    Args:
      xs, ys: operands of this rank and their reductions.
      reduce: (operands, op) -> their reductions, in one call.
    """
    if op == "prod":
        return _weights_of_product(xs, reduce)
    chosen = [(x == y).astype(x.dtype) for x, y in zip(xs, ys, strict=True)]
    return [c / n for c, n in zip(chosen, reduce(chosen, "sum"), strict=True)]  # ties share evenly


def _weights_of_product(xs: Sequence[Any], reduce: Callable[..., Sequence[Any]]) -> list[Any]:
    """The products of the other ranks' operands, without dividing by zeros."""
    zero_here = [(x == 0).astype(x.dtype) for x in xs]
    nonzero = [jnp.where(x == 0, 1, x) for x in xs]
    terms = zip(zero_here, reduce(zero_here, "sum"), nonzero, reduce(nonzero, "prod"), strict=True)
    return [jnp.where(zeros == here, product / own, 0) for here, zeros, own, product in terms]

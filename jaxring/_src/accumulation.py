"""Adds up the gradients of several calls, for `jaxring.optim.distributed`; all by pytrees.

A gradient whose dtype is float0 (of an integer parameter) has no value: nothing is added up for it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxring._src import axes, compression
from jaxring.errors import UsageError


def zero(params: Any) -> Any:
    """The sums of no gradients of `params`, in float32 or wider."""

    def of_leaf(param: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(param), jnp.inexact):
            return jnp.zeros((), jnp.float32)
        return jnp.zeros_like(param, compression.wide_dtype(param))

    return jax.tree.map(of_leaf, params)


def added(sums: Any, gradients: Any, call: str) -> Any:
    def of_leaf(total: Any, gradient: Any) -> Any:
        if gradient.dtype == jax.dtypes.float0:
            return total
        if not jnp.issubdtype(gradient.dtype, jnp.inexact):
            raise UsageError(
                f"{call}: gradients of {gradient.dtype} cannot be added up; convert them to"
                " float32, or use every=1"
            )
        return total + gradient

    return jax.tree.map(of_leaf, sums, gradients)


def scaled(sums: Any, gradients: Any, scale: float, *, wide: bool) -> Any:
    """What is reduced: in the dtypes of `gradients`, or `wide`, where compression rounds it."""

    def of_leaf(total: Any, gradient: Any) -> Any:
        if gradient.dtype == jax.dtypes.float0:
            return gradient
        total = total * scale
        return total if wide else total.astype(gradient.dtype)

    return jax.tree.map(of_leaf, sums, gradients)


def cast_like(xs: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), xs, like)


def zeros_of(shapes: Any) -> Any:
    """Zeros typed as `shapes` (of jax.eval_shape) say, with the axes over which they vary."""

    def of_leaf(shape: Any) -> Any:
        kind = getattr(shape, "manual_axis_type", None)
        zeros = jnp.zeros(shape.shape, shape.dtype)
        return axes.cast_varying(zeros, tuple(kind.varying)) if kind else zeros

    return jax.tree.map(of_leaf, shapes)


def either(condition: Any, f: Any, g: Any, *args: Any) -> Any:
    """lax.cond, without compiling it anew for each eager call."""
    if isinstance(condition, Tracer):
        return lax.cond(condition, f, g, *args)
    return (f if condition else g)(*args)

"""Meshes with axes that the shard_map around a call has not made manual."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.interpreters import mlir

from jaxring._src import axes
from jaxring.errors import UsageError


def others(where: axes.Where) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """(Auto, Explicit) axes of several devices that the shard_map around a call left alone."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(where.axes) & set(mesh.manual_axes):
        return (), ()
    large = {a for a in mesh.axis_names if mesh.shape[a] > 1}
    auto = tuple(a for a in mesh.auto_axes if a in large)
    return auto, tuple(a for a in mesh.explicit_axes if a in large)


def over_explicit(p: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering rule `lower` of `p`, inside a shard_map over Explicit axes that are not manual.

    XLA would gather the operand of a custom call over axes that it partitions itself. For Explicit
    axes the type says how the operand is laid out, so that they can be made manual around the call.
    Done here, not where the call is traced, because only here types know of the axes of a vmap
    around it.
    """

    def rule(ctx: Any, *values: Any, where: axes.Where, **params: Any) -> Any:
        _, explicit = others(where)
        if not explicit:
            return lower(ctx, *values, where=where, **params)
        wrapped = jax.shard_map(
            lambda *xs: tuple(p.bind(*xs, where=where, **params)),
            axis_names=set(explicit),
            in_specs=tuple(aval.sharding.spec for aval in ctx.avals_in),
            out_specs=tuple(aval.sharding.spec for aval in ctx.avals_out),
            check_vma=bool(where.checked),
        )
        return mlir.lower_fun(wrapped)(ctx, *values)

    return rule


def check_whole(x: Any, dimension: int, where: axes.Where, call: str, *, in_front: int = 0) -> None:
    """UsageError if `dimension`, which the call cuts or joins, is itself sharded over an Explicit
    axis. `x` may have `in_front` dimensions more, before those of the caller's array."""
    _, explicit = others(where)
    over = jax.typeof(x).sharding.spec[in_front + dimension] if explicit else None
    if over is not None:
        raise UsageError(
            f"{call}: dimension {dimension}, which the call cuts or joins, is sharded over the"
            f" Explicit mesh axis {over!r}; make that axis manual too, pass another dimension, or"
            " jax.reshard first"
        )

"""install(): jax.lax's collectives lower to jaxring; their types and derivatives stay lax's own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.interpreters import mlir

from jaxring._src import (
    _compat,
    axes,
    buckets,
    calls,
    cuda,
    cuda_lowering,
    custom_call,
    engine,
    lax_plans,
    partitions,
)
from jaxring.errors import UsageError

# Part of jit's cache key, so that each function has one executable with lax and one with jaxring.
_on = jax.make_user_context(False)
_lock = threading.Lock()
_registered = False


def install() -> None:
    """From now on jax.lax's collectives, on platforms with a backend, are carried by jaxring.

    `psum pmean pmax pmin psum_scatter all_gather all_to_all ppermute pbroadcast` of user code, of
    libraries and those that AD inserts, inside shard_map and pmap. Types, derivatives, batching and
    results stay those of lax, except that pmax and pmin propagate NaN. Functions that were jitted
    before compile again at their next call; after `uninstall()` they find their old executables.
    `jaxring.stats()` shows what was carried.

    Lax keeps what jaxring cannot serve: positional axes, meshes of which XLA partitions some axes
    itself, groups of one device, dtypes that jaxring lacks (`jaxring info` lists them), pmax and
    pmin of complex numbers, and a pbroadcast whose source is an array.

    Holds for all threads. The settings `algorithm`, `deterministic` and `chunk_bytes` apply.

    Example:

        jaxring.install()
        grads = train_step(params, batch)  # its lax.pmean is an allreduce of jaxring's
    """
    _register()
    _on.set_global(True)


def uninstall() -> None:
    """Undoes `install()`: what is called from now on is lax's again; all that was jitted stays
    cached."""
    _on.set_global(False)


@contextlib.contextmanager
def replacing_lax() -> Iterator[None]:
    """`install()` for the functions that this thread calls inside the `with` block.

    What counts is where a jitted function is called, not where it was defined or jitted.

    Example:

        with jaxring.replacing_lax():
            step(params)  # its lax.psum is carried by jaxring
        step(params)      # the executable of before, with lax's psum
    """
    _register()
    with _on(True):
        yield


def _register() -> None:
    """Puts our rules before lax's own; done once and only when asked for."""
    global _registered
    with _lock:
        if _registered:
            return
        for name, plan in lax_plans.PLANS.items():
            p = _compat.lax_primitive(name)
            if p is None:
                continue
            for platform in engine.PLATFORMS:
                by_lax = _compat.lowering_rule(p, platform) or _missing(name, platform)
                rule = functools.partial(_lower, plan, by_lax)
                # cacheable=False: a cached lowering would give one call index to several calls.
                mlir.register_lowering(p, rule, platform=platform, cacheable=False)
        _registered = True


def _missing(name: str, platform: str) -> Any:
    """The rule of a primitive that lax does not lower."""

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        raise UsageError(
            f"lax.{name}: jax.lax does not lower {name} for {platform}; use jaxring.{name}, or call"
            " it inside jaxring.replacing_lax() over several devices"
        )

    return rule


def _lower(plan: lax_plans.Planner, by_lax: Any, ctx: Any, operand: Any, **params: Any) -> Any:
    call = _call(plan, ctx, params) if _on.value else None
    return by_lax(ctx, operand, **params) if call is None else _emit(ctx, operand, *call)


def _call(
    plan: lax_plans.Planner, ctx: Any, params: dict[str, Any]
) -> tuple[lax_plans.Plan, list[list[int]], axes.Where] | None:
    """(plan, groups, ranks) of a call that we can serve; None for one that stays lax's."""
    names = params["axes"] if "axes" in params else params["axis_name"]
    names = tuple(names) if isinstance(names, (tuple, list)) else (names,)
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", ())
    if any(isinstance(name, int) or name not in manual for name in names):
        return None
    mesh = context.mesh
    if any(mesh.shape[a] > 1 and a not in manual for a in mesh.axis_names):
        return None  # XLA would gather the operand over the axes that it partitions itself
    where = axes.Where(names, params.get("axis_index_groups"))
    groups = partitions.partition_groups(mesh, where)
    if max(len(g) for g in groups) == 1:
        return None
    planned = plan(ctx.avals_in[0], ctx.avals_out[0], groups, params)
    if planned is None or (cuda.is_target(ctx) and _only_lax(ctx, planned, groups, where)):
        return None
    return planned, groups, where


def _only_lax(ctx: Any, plan: lax_plans.Plan, groups: list[list[int]], where: axes.Where) -> bool:
    """Whether GPUs cannot serve the call."""
    how = calls.how("auto", plan.name, plan.name, plan.collective, plan.op)
    return cuda_lowering.why_not(ctx, plan.collective, groups, where, how, plan.op) is not None


def _emit(
    ctx: Any, operand: Any, plan: lax_plans.Plan, groups: list[list[int]], where: axes.Where
) -> Sequence[Any]:
    (aval,) = ctx.avals_in
    sent, received = ShapedArray(plan.sent, aval.dtype), ShapedArray(plan.received, aval.dtype)
    operand = _rearranged(ctx, operand, ShapedArray(aval.shape, aval.dtype), plan.before)
    how = calls.how("auto", plan.name, plan.name, plan.collective, plan.op)
    how = dataclasses.replace(how, layout=plan.layout)
    size_bytes = max(buckets.size_bytes(sent), buckets.size_bytes(received))
    values = custom_call.emit(
        ctx.replace(primitive=None, avals_in=[sent], avals_out=[received]),
        [operand],
        collective=plan.collective,
        op=plan.op,
        algorithm=how.algorithm_for(size_bytes),
        groups=groups,
        where=where,
        how=how,
        root=plan.root,
        permutation=plan.permutation,
    )
    return [_rearranged(ctx, values[0], received, plan.after)]


def _rearranged(ctx: Any, value: Any, aval: Any, f: Any) -> Any:
    """`f` of a value, in the same lowering."""
    if f is None:
        return value
    inner = ctx.replace(primitive=None, avals_in=[aval], avals_out=None)
    return mlir.lower_fun(f, multiple_results=False)(inner, value)[0]

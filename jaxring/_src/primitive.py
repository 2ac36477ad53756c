"""Defines a JAX primitive from its rules. The rule for lowering is custom_call.py's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxring._src import cuda_lowering, custom_call, engine, partial_auto

# JAX's notes on where an operation comes from, and so its profiler, skip our own frames.
source_info_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_defined: dict[str, Primitive] = {}


def define(
    name: str,
    *,
    abstract_eval: Callable[..., Any],
    lower: Callable[..., Any],
    batch: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    without_backend: Callable[..., Any],
) -> Primitive:
    """A primitive of several operands and as many results, with its rules registered.

    Args:
      name: of the collective; `bind` knows it by this.
      abstract_eval: (*avals, **params) -> (result avals, effects).
      lower: (ctx, *values, **params) -> values, on the platforms that have a backend.
      batch: (axis_data, values, dims, **params) -> (results, dims), a bound vmap axis included.
      jvp: (primals, tangents, **params) -> (results, tangents).
      transpose: (cotangents, *operands, **params) -> cotangents.
      without_backend: like `lower`, for any other platform.
    """
    p = _with_rules(name, abstract_eval, batch, jvp, transpose)
    # cacheable=False: a cached lowering would give the same call index to all calls with equal
    # parameters.
    mlir.register_lowering(p, without_backend, cacheable=False)
    on_cuda = cuda_lowering.rule(name, lower, without_backend, custom_call.groups_of)
    for platform, rule in zip(engine.PLATFORMS, (lower, on_cuda), strict=True):
        rule = partial_auto.over_explicit(p, rule)
        mlir.register_lowering(p, rule, platform=platform, cacheable=False)
    return p


def define_cast(
    name: str,
    *,
    abstract_eval: Callable[..., Any],
    batch: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
) -> Primitive:
    """A primitive that changes types or derivatives only: its results are its operands, on every
    platform. The rules are those of `define`."""
    p = _with_rules(name, abstract_eval, batch, jvp, transpose)
    mlir.register_lowering(p, lambda ctx, *values, **params: values)
    return p


def _with_rules(name: str, abstract_eval: Any, batch: Any, jvp: Any, transpose: Any) -> Primitive:
    p = Primitive(f"jaxring_{name}")
    p.multiple_results = True
    _defined[name] = p
    p.def_impl(functools.partial(xla.apply_primitive, p))
    p.def_effectful_abstract_eval(abstract_eval)
    batching.fancy_primitive_batchers[p] = batch
    ad.primitive_jvps[p] = jvp
    ad.primitive_transposes[p] = transpose
    return p


def bind(name: str, *xs: Any, **params: Any) -> Sequence[Any]:
    """Binds the primitive of that name: for rules of collectives that need each other, as those do
    that are each other's transpose."""
    return _defined[name].bind(*xs, **params)


def jvp_of_linear(bind: Callable[..., Sequence[Any]], primals: Any, tangents: Any) -> Any:
    """The JVP of a linear primitive: itself, on those tangents that are not zero, in one call."""
    results = bind(*primals)
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
    return results, on_live(bind, tangents, [type(t) is not ad.Zero for t in tangents], zeros)


def transpose_of_linear(bind: Callable[..., Sequence[Any]], cotangents: Any, operands: Any) -> Any:
    """Cotangents of the linear operands: `bind` of those that are not zero, in one call."""
    linear = [ad.is_undefined_primal(x) for x in operands]
    live = [
        is_linear and type(ct) is not ad.Zero
        for is_linear, ct in zip(linear, cotangents, strict=True)
    ]
    rest = [
        ad.Zero(x.aval) if is_linear else None
        for is_linear, x in zip(linear, operands, strict=True)
    ]
    return on_live(bind, cotangents, live, rest)


def on_live(
    f: Callable[..., Sequence[Any]], values: Any, live: Sequence[bool], others: Sequence[Any]
) -> list[Any]:
    """`f` of the live values, in one call; `others` in the places of the rest."""
    chosen = [v for v, is_live in zip(values, live, strict=True) if is_live]
    results = iter(f(*chosen) if chosen else ())
    return [next(results) if is_live else o for is_live, o in zip(live, others, strict=True)]

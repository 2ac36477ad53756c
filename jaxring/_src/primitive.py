"""Defines a JAX primitive from its rules, and emits the one custom call that all of them lower to.

Only this module (and `jaxring.communicator`) knows the native module.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir, xla

from jaxring import _native
from jaxring._src import axes
from jaxring.communicator import ensure_mesh
from jaxring.errors import UsageError

# JAX's notes on where an operation comes from, and so its profiler, skip our own frames.
source_info_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

TARGET = "jaxring_collective"
PLATFORMS = ("cpu",)  # those with a backend


# -- A primitive from its rules --------------------------------------------------------------------


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
      abstract_eval: (*avals, **params) -> (result avals, effects).
      lower: (ctx, *values, **params) -> values, on the platforms that have a backend.
      batch: (axis_data, values, dims, **params) -> (results, dims), a bound vmap axis included.
      jvp: (primals, tangents, **params) -> (results, tangents).
      transpose: (cotangents, *operands, **params) -> cotangents.
      without_backend: like `lower`, for any other platform.
    """
    p = Primitive(name)
    p.multiple_results = True
    p.def_impl(functools.partial(xla.apply_primitive, p))
    p.def_effectful_abstract_eval(abstract_eval)
    batching.fancy_primitive_batchers[p] = batch
    ad.primitive_jvps[p] = jvp
    ad.primitive_transposes[p] = transpose
    # cacheable=False: a cached lowering would give the same call index to all calls with equal
    # parameters.
    mlir.register_lowering(p, without_backend, cacheable=False)
    for platform in PLATFORMS:
        mlir.register_lowering(p, lower, platform=platform, cacheable=False)
    return p


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


# -- Lowering --------------------------------------------------------------------------------------


def groups_of(ctx: Any, where: axes.Where, call: str) -> list[list[int]]:
    """The groups of partition ids of a call; none in communicator mode.

    Raises:
      UsageError: a Communicator in a program for several devices, where one process would be
        several ranks.
    """
    context = ctx.module_context.axis_context
    if not where.communicator:
        return axes.partition_groups(context.mesh, where)
    mesh = getattr(context, "mesh", None)
    devices = context.num_devices if mesh is None else mesh.size
    if devices not in (None, 1):
        raise UsageError(
            f"{call}: with a Communicator each process computes on one device, but this program is"
            f" for {devices}; reduce over a mesh axis, or place the arguments on one device"
        )
    return []


def emit(
    ctx: Any,
    operands: Sequence[Any],
    *,
    collective: str,
    op: str,
    algorithm: str,
    groups: Sequence[Sequence[int]],
    where: axes.Where,
    how: Any,
) -> Sequence[Any]:
    """Emits the custom call: the partition id and `operands` in, values of `ctx.avals_out` out."""
    ensure_registered()
    device_ids, processes = [], []
    if not where.communicator:
        device_ids, processes = axes.devices_of(ctx.module_context.axis_context.mesh)
    if device_ids:
        ensure_mesh(
            [[device_ids[i] for i in g] for g in groups],
            dict(zip(device_ids, processes, strict=True)),
        )
    module, call = _site(ctx.module_context.module)
    # Devices of one process run one executable; there XLA may order its calls as it likes.
    ordered = bool(where.communicator) or len(set(processes)) > 1
    attributes = {
        "collective": collective,
        "op": op,
        "algorithm": algorithm,
        "name": how.name,
        "communicator": where.communicator,
        "group_members": _int64(itertools.chain(*groups)),
        "group_sizes": _int64(len(g) for g in groups),
        "device_ids": _int64(device_ids),
        "processes": _int64(processes),
        "call": np.int64(call),
        "module": module,
        "deterministic": how.deterministic,
        "chunk_bytes": np.int64(how.chunk_bytes),
        "ordered": ordered,
    }
    # Set on the HLO only: XLA must not merge, hoist or drop calls, but a JAX effect would cost some
    # 100 us for each launch.
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    scalar = ShapedArray((), np.dtype(np.int32))
    first = [_partition_id(ctx, where), *(_previous_call(ctx) if ordered else [])]
    inner = ctx.replace(
        primitive=None,
        avals_in=[scalar] * len(first) + list(ctx.avals_in),
        avals_out=[scalar] * ordered + list(ctx.avals_out),
    )
    results = rule(inner, *first, *operands, **attributes)
    if ordered:
        _note_call(ctx)
    return results[ordered:]


def _int64(values: Any) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _partition_id(ctx: Any, where: axes.Where) -> Any:
    """An s32 scalar: the position in the mesh of the device that runs."""
    if where.communicator:
        return mlir.ir_constant(np.int32(0))
    context = ctx.module_context.axis_context
    mesh = context.mesh
    if set(mesh.axis_names) == set(context.manual_axes):
        scalar = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        return stablehlo.convert(scalar, stablehlo.partition_id())

    # XLA refuses partition_id where it partitions some axes itself; axis_index knows a way there.
    def position() -> Any:
        index: Any = np.int32(0)
        for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
            index = index * np.int32(size) + (
                lax.axis_index(axis) if axis in context.manual_axes else 0
            )
        return index

    return mlir.lower_fun(position, multiple_results=False)(
        ctx.replace(primitive=None, avals_in=[])
    )[0]


# -- Where a call stands ---------------------------------------------------------------------------


@dataclasses.dataclass
class _Module:
    name: str
    calls: itertools.count[int] = dataclasses.field(default_factory=itertools.count)
    # Position of the last ordered call in each block. Not the call itself: it would keep its module
    # alive.
    last: dict[int, int] = dataclasses.field(default_factory=dict)


_lock = threading.Lock()
_modules: weakref.WeakKeyDictionary[Any, _Module] = weakref.WeakKeyDictionary()
_modules_of_name: collections.Counter[str] = collections.Counter()


def _site(module: Any) -> tuple[str, int]:
    """(identity of the module that is being lowered, index of this call in program order)."""
    with _lock:
        entry = _modules.get(module)
        if entry is None:
            name = ir.StringAttr(module.operation.attributes["sym_name"]).value
            entry = _Module(f"{name}#{_modules_of_name[name]}")
            _modules_of_name[name] += 1
            _modules[module] = entry
        return entry.name, next(entry.calls)


def _previous_call(ctx: Any) -> list[Any]:
    """The scalar result of the ordered call before this one in its block, if there is one.

    As an operand of this call it makes XLA keep the two in program order. Executables of different
    processes may differ by work of one rank only, and XLA then schedules independent calls
    differently. Two ranks were then seen to wait for each other in different calls (in
    tests/multiprocess/test_matching.py, guards_against_nan), as if XLA:CPU ran small programs one
    call at a time, waiting for each; its source was not read. Neither tokens of JAX's ordered
    effects (hundreds of us for each launch) nor optimization_barrier (removed before scheduling)
    would do. Calls in different functions or loops of a program are not ordered.
    """
    point: Any = ir.InsertionPoint.current
    block = point.block
    index = _modules[ctx.module_context.module].last.get(hash(block))
    if index is None or index >= len(block.operations):
        return []
    # A block that JAX has thrown away may have had this one's address: is it really one of ours?
    call = block.operations[index].operation
    ours = "call_target_name" in call.attributes and (
        ir.StringAttr(call.attributes["call_target_name"]).value == TARGET
    )
    return [call.results[0]] if ours else []


def _note_call(ctx: Any) -> None:
    """Remembers the call just emitted, the last operation of its block."""
    point: Any = ir.InsertionPoint.current
    block = point.block
    _modules[ctx.module_context.module].last[hash(block)] = len(block.operations) - 1


# -- The native module -----------------------------------------------------------------------------


@functools.cache
def lists() -> dict[str, Any]:
    """The native lists of collectives, ops, dtypes and algorithms."""
    return _native.lists()


_registered = False


def ensure_registered() -> None:
    """Registers the handler with XLA, once; done at the first lowering.

    The CPU backend has to exist before: it fails to initialise with a State type registered.
    """
    global _registered
    with _lock:
        if _registered:
            return
        jax.devices("cpu")
        for name, registration in _native.ffi_types().items():
            jax.ffi.register_ffi_type(name, registration, platform="cpu")
        for name, handler in _native.ffi_registrations().items():
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        _registered = True

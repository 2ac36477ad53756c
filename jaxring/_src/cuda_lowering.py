"""The custom call as GPUs take it: the leaves packed into one buffer, attributes that say where
each device stands, and what is checked before.

Which calls can be served is decided from what all ranks know alike: types, groups, the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from jaxring import communicator
from jaxring._src import buckets, cuda, cuda_connections, sites
from jaxring._src.axes import Where
from jaxring._src.store import JaxStore
from jaxring.config import config

_ROWS_IN = ("reduce_scatter", "all_to_all")  # operands with one row for each rank in front
_ROWS_OUT = ("all_gather", "all_to_all")  # results with such rows

# What is summed in another dtype where partial sums pass from host to host: floats so that they
# are rounded once, integers because NCCL lacks them.
_WIDER = {"int16": "int32", "uint16": "uint32"}


# -- Can it be served? -----------------------------------------------------------------------------


def rule(
    name: str,
    lower: Callable[..., Any],
    without_backend: Callable[..., Any],
    groups_of: Callable[..., list[list[int]]],
) -> Callable[..., Any]:
    """The rule for CUDA: `lower`, or `without_backend` where GPUs cannot serve the call."""

    def on_cuda(ctx: Any, *values: Any, where: Where, how: Any, **params: Any) -> Any:
        groups = groups_of(ctx, where, f"jaxring.{name}")
        why = why_not(ctx, name, groups, where, how, params.get("op", ""))
        if why is None:
            return lower(ctx, *values, where=where, how=how, **params)
        return without_backend(ctx, *values, where=where, how=how, why=why, **params)

    return on_cuda


def why_not(
    ctx: Any, collective: str, groups: Sequence[Sequence[int]], where: Where, how: Any, op: str
) -> str | None:
    """Why GPUs cannot serve the call, "" if there is no backend at all; None if they can, and then
    its communicators are there or being made.

    Args:
      groups: of partition ids; empty with a Communicator.
    """
    sizes = sorted({len(g) for g in groups})
    if sizes and max(sizes) == 1:
        return None  # nothing is emitted
    if len(sizes) > 1:
        return f"on GPUs all groups must have one size, but they have {sizes}"
    size = sizes[0] if sizes else communicator.find(where.communicator).world_size
    if size > cuda.MAX_RANKS:
        return f"on GPUs a group has at most {cuda.MAX_RANKS} ranks, but this one has {size}"
    if not cuda.will_run_here(ctx):
        return None
    native = cuda.module()
    if native is None:
        return ""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    several = len(_hosts(mesh)) > 1
    algorithm = how.algorithm_for(sum(buckets.size_bytes(aval) for aval in ctx.avals_in))
    for dtype in dict.fromkeys(np.dtype(aval.dtype) for aval in ctx.avals_in):
        text = _by_nccl(op, dtype, how.deterministic) if several else None
        text = text or native.why_not_served(
            collective, op, str(dtype), algorithm, how.deterministic, size
        )
        if text:
            return text
    cuda.register()
    reason = _connect(native, mesh, groups, where, how)
    if cuda.gives_cliques() and not several and not where.communicator:
        reason = reason or _without_peers(ctx, native, mesh, collective, op, how)
    what = f"{collective} {op} {groups} {ctx.avals_in} {algorithm} {how.deterministic}"
    return _agreed(reason, mesh, how, what)


def _connect(
    native: Any, mesh: Any, groups: Sequence[Sequence[int]], where: Where, how: Any
) -> str | None:
    """Begins to make the call's communicators, where XLA does not; why it cannot work, or None."""
    if where.communicator:
        comm = communicator.find(where.communicator)
        processes, me, store = comm.place()
        device = jax.local_devices(backend="cuda")[0].local_hardware_id
        devices = [device] * len(processes)
        cuda_connections.ensure(native, comm.key, processes, devices, me, store, comm.state)
        return None
    by_partition = _devices(mesh)
    if not (by_partition and cuda.sets_up_here()):
        return None
    for group in groups:
        devices = [by_partition[i] for i in group]
        processes = [d.process_index for d in devices]
        if jax.process_index() not in processes:
            continue
        ids = [d.local_hardware_id for d in devices]
        spans = len(set(processes)) > 1
        if not spans and not native.all_peers(ids):
            return f"GPUs {ids} cannot read each other's memory, which jaxlib before 0.11.2 needs"
        key = "mesh:" + ",".join(str(d.id) for d in devices)
        store = JaxStore() if spans else None
        cuda_connections.ensure(native, key, processes, ids, jax.process_index(), store)
        # Whether lax must serve has to be known now, and all processes come here.
        if spans and how.fallback:
            state = cuda_connections.wait(native, key, config.timeout_s)
            if state != "ready":
                return state
    return None


def _without_peers(
    ctx: Any, native: Any, mesh: Any, collective: str, op: str, how: Any
) -> str | None:
    """Why NCCL cannot carry the call, where it must: GPUs of this process cannot map each other."""
    mine = [d for d in _devices(mesh) if d.process_index == jax.process_index()]
    if native.all_peers([d.local_hardware_id for d in mine]):
        return None
    for dtype in dict.fromkeys(str(aval.dtype) for aval in ctx.avals_in):
        if text := native.why_not_by_nccl(collective, op, dtype, how.deterministic):
            return f"GPUs of this process cannot read each other's memory, and {text}"
    return None


def _agreed(reason: str | None, mesh: Any, how: Any, what: str) -> str | None:
    """A reason that one process of the mesh has is everybody's, as all must lower one program.

    Without `fallback` a reason is an error, of which the others hear in the end."""
    devices = _devices(mesh)
    processes = sorted({d.process_index for d in devices})
    if len(processes) < 2 or not how.fallback:
        return reason
    what = f"{[d.id for d in devices]} {what}"
    return cuda_connections.agree(
        JaxStore(), processes, jax.process_index(), what, reason, config.timeout_s
    )


def _by_nccl(op: str, dtype: np.dtype, deterministic: bool) -> str | None:
    """Why NCCL, which joins hosts, cannot reduce; `_widened` is applied before."""
    if op and deterministic:
        return "deterministic=True does not reach across hosts on GPUs"
    if op == "prod" and dtype.kind == "c":
        return f"across hosts there is no prod of {dtype} on GPUs"
    return None


# -- Where devices are -----------------------------------------------------------------------------


def _devices(mesh: Any) -> list[Any]:
    """The mesh's GPUs by partition id; empty for an abstract mesh and one of other devices."""
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh):
        return []
    devices = list(mesh.devices.flat)
    return devices if all(d.platform == "gpu" for d in devices) else []


def _hosts(mesh: Any) -> set[Any]:
    """XLA numbers what NVLink or one host joins: slices. Without that all is taken for one host,
    and what cannot be mapped is found at run time."""
    return {getattr(d, "slice_index", None) for d in _devices(mesh)}


def places(ctx: Any) -> tuple[list[int], list[int], list[int]]:
    """(global id, process, number within the process) of the devices by partition id; empty where
    the program is not for this process's own devices, so that XLA must say which rank it is."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    devices = _devices(mesh) if cuda.will_run_here(ctx) else []
    return (
        [d.id for d in devices],
        [d.process_index for d in devices],
        [d.local_hardware_id for d in devices],
    )


# -- The call --------------------------------------------------------------------------------------


def emit(
    ctx: Any,
    operands: Sequence[Any],
    previous: Sequence[Any],
    target: str,
    attributes: dict[str, Any],
) -> Sequence[Any]:
    """Emits the custom call: values of `ctx.avals_out`.

    Args:
      previous: the order of the ordered call before it, or nothing.
      attributes: but for `shapes`.
    """
    collective = attributes["collective"]
    shapes = " ".join(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in ctx.avals_in)
    if collective == "barrier":
        # What passes through it may differ between ranks.
        attributes = {**attributes, "shapes": ""}
        return _call(ctx, operands, ctx.avals_in, ctx.avals_out, previous, target, attributes, True)
    attributes = {**attributes, "shapes": shapes}
    wide = _widened(ctx, attributes["op"])

    def pack(*xs: Any) -> Any:
        return _joined([x.astype(wide) if wide else x for x in xs], collective in _ROWS_IN)

    def unpack(y: Any) -> list[Any]:
        return _cut(y, ctx.avals_out, collective in _ROWS_OUT)

    kinds = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    packed_in = jax.eval_shape(pack, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in kinds))
    packed_out = jax.eval_shape(
        lambda *ys: _joined(ys, collective in _ROWS_OUT),
        *(jax.ShapeDtypeStruct(a.shape, wide or a.dtype) for a in ctx.avals_out),
    )
    avals = [ShapedArray(s.shape, s.dtype) for s in (packed_in, packed_out)]
    inner = ctx.replace(primitive=None, avals_in=kinds, avals_out=None)
    (packed,) = mlir.lower_fun(pack, multiple_results=False)(inner, *operands)
    (result,) = _call(ctx, [packed], avals[:1], avals[1:], previous, target, attributes, False)
    inner = ctx.replace(primitive=None, avals_in=avals[1:], avals_out=None)
    return mlir.lower_fun(unpack)(inner, result)


def _call(
    ctx: Any,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    previous: Sequence[Any],
    target: str,
    attributes: dict[str, Any],
    in_place: bool,
) -> Sequence[Any]:
    order = ShapedArray((), np.dtype(np.int32))
    first = len(previous)
    aliases = {first + i: 1 + i for i in range(len(operands))} if in_place else {}
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
    inner = ctx.replace(
        primitive=None,
        avals_in=[order] * first + list(avals_in),
        avals_out=[order, *avals_out],
    )
    results = rule(inner, *previous, *operands, **attributes)
    sites.note_call(ctx, target, 0, order)
    return results[1:]


def _widened(ctx: Any, op: str) -> np.dtype | None:
    """The dtype in which operands are reduced across hosts, if not their own."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if not op or len(_hosts(mesh)) < 2:
        return None
    dtype = np.dtype(ctx.avals_in[0].dtype)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return np.dtype(_WIDER[str(dtype)]) if str(dtype) in _WIDER else None


def _joined(xs: Sequence[Any], has_rows: bool) -> Any:
    """One array of all: flat, or with one row for each rank."""
    if len(xs) == 1:
        return xs[0]
    flat = [x.reshape(x.shape[0], -1) if has_rows else x.reshape(-1) for x in xs]
    return jnp.concatenate(flat, axis=1 if has_rows else 0)


def _cut(y: Any, avals: Sequence[Any], has_rows: bool) -> list[Any]:
    """The inverse of `_joined`: arrays of these types."""
    if len(avals) == 1:
        return [y.astype(avals[0].dtype)]
    results, begin = [], 0
    for aval in avals:
        size = 1
        for n in aval.shape[1:] if has_rows else aval.shape:
            size = size * n
        part = y[:, begin : begin + size] if has_rows else y[begin : begin + size]
        results.append(part.reshape(aval.shape).astype(aval.dtype))
        begin = begin + size
    return results

"""The one custom call that all collectives lower to, and which ranks it joins."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jaxring import _native
from jaxring._src import (
    axes,
    buckets,
    cuda,
    cuda_lowering,
    engine,
    mesh_connections,
    partitions,
    sites,
)
from jaxring.errors import UsageError

TARGET = "jaxring_collective"


def groups_of(ctx: Any, where: axes.Where, call: str) -> list[list[int]]:
    """The groups of partition ids of a call; none in communicator mode.

    Raises:
      UsageError: a Communicator in a program for several devices, where one process would be
        several ranks.
    """
    context = ctx.module_context.axis_context
    if not where.communicator:
        return partitions.partition_groups(context.mesh, where)
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
    groups: Sequence[Sequence[int]],
    where: axes.Where,
    how: Any,
    op: str = "",
    algorithm: str = "auto",
    root: int = 0,
    permutation: Sequence[int] = (),
    in_place: bool = False,
) -> Sequence[Any]:
    """Emits the custom call: the partition id and `operands` in, values of `ctx.avals_out` out.

    Args:
      op: of a collective that reduces.
      root: the rank in its group that a broadcast comes from or a reduce goes to.
      permutation: of a ppermute: by rank, the rank it sends to, or -1.
      in_place: results are the operands, so that XLA may give both one buffer. Where
        `how.overlaps`, this holds for operands that the program has computed itself.
    """
    engine.register()
    on_cuda, local_ids = cuda.is_target(ctx), []
    if on_cuda:
        device_ids, processes, local_ids = cuda_lowering.places(ctx)
    else:
        device_ids, processes = _connected(ctx, groups, where)
    module, call = sites.next_site(ctx.module_context.module)
    # Devices of one process run one executable; XLA:CPU may order its calls there as it likes, but
    # GPUs have one operation at a time on a communicator, whatever streams XLA uses.
    ordered = on_cuda or bool(where.communicator) or len(set(processes)) > 1
    attributes = {
        "collective": collective,
        "op": op,
        "algorithm": algorithm,
        "root": np.int64(root),
        "permutation": _int64(permutation),
        "name": sites.label(ctx, how.name),
        # A name that the user gave must be the same on all ranks: of equal calls in another order
        # nothing else would tell.
        "layout": ", ".join(filter(None, (how.layout, how.name and f"name={_short(how.name)}"))),
        "communicator": where.communicator,
        "group_members": _int64(itertools.chain(*groups)),
        "group_sizes": _int64(len(g) for g in groups),
        "device_ids": _int64(device_ids),
        "processes": _int64(processes),
        "call": np.int64(call),
        "module": module,
        "deterministic": how.deterministic,
        "chunk_bytes": np.int64(how.chunk_bytes),
    }
    previous = sites.previous_call(ctx, TARGET) if ordered else []
    if on_cuda:
        attributes |= {"ordered": True, "local_ids": _int64(local_ids)}
        return cuda_lowering.emit(ctx, operands, [x for x, _ in previous], TARGET, attributes)
    if ordered and how.overlaps:  # without an order it would wait for them
        previous = list(dict([*previous, *sites.held_results(ctx, TARGET)]).items())
    # What a call waits for anyway needs no second edge.
    own = set(operands)
    previous = [(x, kind) for x, kind in previous if x not in own]
    carrier = _carrier_of_order(ctx.avals_out)
    by_scalar = ordered and carrier is None
    attributes["ordered"] = by_scalar
    scalar = ShapedArray((), np.dtype(np.int32))
    first = [(_partition_id(ctx, where), scalar), *previous]
    aliases = {
        len(first) + i: by_scalar + i
        for i, x in enumerate(operands)
        if in_place or (how.overlaps and not isinstance(x.owner, ir.Block))
    }
    # Set on the HLO only: XLA must not merge, hoist or drop calls, but a JAX effect would cost some
    # 100 us for each launch.
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True, operand_output_aliases=aliases)
    inner = ctx.replace(
        primitive=None,
        avals_in=[kind for _, kind in first] + list(ctx.avals_in),
        avals_out=[scalar] * by_scalar + list(ctx.avals_out),
    )
    with sites.named(attributes["name"] if how.name else ""):
        results = rule(inner, *(x for x, _ in first), *operands, **attributes)
    if ordered:
        kind = scalar if carrier is None else ctx.avals_out[carrier]
        overlapping = inner.avals_out if how.overlaps else ()
        sites.note_call(ctx, TARGET, carrier or 0, kind, own, overlapping)
    return results[by_scalar:]


def _short(name: str) -> str:
    """A line of a signature, which has to fit into what ranks tell each other."""
    text = ascii(name)[1:-1]
    return text if len(text) <= 64 else f"{text[:48]}…{zlib.crc32(text.encode()):08x}"


def _carrier_of_order(results: Sequence[Any]) -> int | None:
    """The smallest result with anything in it, for which the next call waits.

    It is alive anyway. A scalar of its own would be dead with the next call, and whatever XLA put
    in its place would wait for that call: nothing would run while ranks communicate.
    """
    sizes = {i: buckets.size_bytes(aval) for i, aval in enumerate(results)}
    return min((i for i in sizes if sizes[i]), key=sizes.__getitem__, default=None)


def _connected(
    ctx: Any, groups: Sequence[Sequence[int]], where: axes.Where
) -> tuple[list[int], list[int]]:
    """Begins to join the processes of a mesh: (global device id, process) by partition id."""
    if where.communicator:
        return [], []
    device_ids, processes = partitions.devices_of(ctx.module_context.axis_context.mesh)
    if device_ids:
        mesh_connections.ensure(
            _native,
            [[device_ids[i] for i in g] for g in groups],
            dict(zip(device_ids, processes, strict=True)),
        )
    return device_ids, processes


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

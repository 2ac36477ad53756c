"""From axis names to the ranks of a call: checks while tracing, partition ids while lowering."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

from jaxring.communicator import Communicator
from jaxring.errors import UnboundAxisError, UsageError

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Where:
    """Who takes part in a call. A static parameter of every primitive.

    Attributes:
      axes: names of mesh and vmap axes; ranks are ordered by them, the last one fastest. Empty in
        communicator mode.
      groups: `axis_index_groups`, or None for one group.
      checked: those of `axes` whose variation JAX's types track, that is mesh axes under
        check_vma=True. Their transposes differ, as those of lax's psum_invariant and psum do.
      communicator: the key of a Communicator, or "".
    """

    axes: tuple[Hashable, ...] = ()
    groups: Groups | None = None
    checked: tuple[Hashable, ...] = ()
    communicator: str = ""

    def without(self, axis: Hashable) -> Where:
        """The same call when `axis`, a vmap axis, is done with."""
        return dataclasses.replace(self, axes=tuple(a for a in self.axes if a != axis))

    def unchecked(self) -> Where:
        """The part of the call over axes that types do not track."""
        rest = tuple(a for a in self.axes if a not in self.checked)
        return dataclasses.replace(self, axes=rest, checked=())


def resolve(axis_name: Any, axis_index_groups: Any, call: str) -> Where:
    """Checks the arguments that say who takes part; `call` begins the error messages.

    Raises:
      UnboundAxisError: no enclosing shard_map, pmap or vmap binds a name.
      UsageError: duplicate or positional axes, groups that are no partition, a Communicator among
        names.
    """
    if isinstance(axis_name, Communicator):
        if axis_index_groups is not None:
            raise UsageError(
                f"{call}: axis_index_groups go with axis names; split a Communicator with"
                " comm.split(color)"
            )
        return Where(communicator=axis_name.key)
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        _check_name(axis, axes, call)
    tracked = [axis for axis in axes if _varies_over(_axis_index(axis, call)[0], axis)]
    checked = tuple(a for a in tracked if a in manual_axes())
    return Where(axes, _check_groups(axis_index_groups, axes, checked, call), checked)


def _check_name(axis: Any, axes: tuple[Any, ...], call: str) -> None:
    if isinstance(axis, int):
        raise UsageError(
            f"{call}: {axis} is a positional axis; reduce it before the call (jnp.sum(x, {axis}))"
            " and pass axis names"
        )
    if isinstance(axis, Communicator):
        raise UsageError(f"{call}: a Communicator stands alone, it cannot be one of several axes")
    if axes.count(axis) > 1:
        raise UsageError(f"{call}: axis {axis!r} is named twice in {axes}; name each axis once")


def _axis_index(axis: Any, call: str) -> tuple[Any, set[Any]]:
    """The type of axis_index, which tells whether types track `axis`, and its effect."""
    try:
        return primitives.axis_index_p.abstract_eval(axis_name=axis)
    except (NameError, TypeError):
        raise UnboundAxisError(
            f"{call}: axis name {axis!r} is not bound; call it inside jax.shard_map, jax.pmap or"
            " jax.vmap with that axis name, or pass a jaxring.Communicator"
        ) from None


def _check_groups(
    given: Any, axes: tuple[Any, ...], checked: tuple[Any, ...], call: str
) -> Groups | None:
    if given is None:
        return None
    if checked:
        raise UsageError(
            f"{call}: with axis_index_groups the result differs between groups, which"
            " check_vma=True cannot type; pass check_vma=False to jax.shard_map, or reduce over a"
            " sub-axis of the mesh"
        )
    groups = tuple(tuple(int(i) for i in group) for group in given)
    size = lax.axis_size(axes)
    if sorted(i for group in groups for i in group) != list(range(size)):
        raise UsageError(
            f"{call}: axis_index_groups must hold each index 0..{size - 1} exactly once,"
            f" got {given}"
        )
    return groups


def manual_axes() -> tuple[Hashable, ...]:
    """The mesh axes that an enclosing shard_map or pmap has made manual."""
    return jax.sharding.get_abstract_mesh().manual_axes


def varying_axes(x: Any) -> frozenset[Hashable]:
    """The mesh axes over which `x` varies by its type; none under check_vma=False."""
    return jax.typeof(x).manual_axis_type.varying


def _varies_over(aval: Any, axis: Hashable) -> bool:
    return axis in aval.manual_axis_type.varying


def group_sizes(where: Where) -> set[int]:
    """The sizes of the groups, while tracing; for calls over axes."""
    return {len(g) for g in where.groups} if where.groups else {lax.axis_size(where.axes)}


# -- Types -----------------------------------------------------------------------------------------


def invariant_result(aval: Any, where: Where) -> tuple[Any, set[Any]]:
    """Type and effects of a result that is equal on all ranks, as allreduce's, by JAX's own rules.

    pmax has exactly this rule in both modes of check_vma; vmap axes carry no types, only the effect
    that says that the axis is in use.
    """
    effects: set[Any] = set()
    mesh_axes = tuple(a for a in where.axes if a in manual_axes())
    if mesh_axes:
        aval, used = primitives.pmax_p.abstract_eval(aval, axes=mesh_axes, axis_index_groups=None)
        effects |= used
    for axis in where.axes:
        if axis not in mesh_axes:
            effects |= _axis_index(axis, "jaxring")[1]
    return aval, effects


def varying_result(aval: Any, where: Where) -> Any:
    """The type of an operand after `cast_varying(x, where.checked)`."""
    varying = aval.manual_axis_type.varying | set(where.checked)
    return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=varying))


def cast_varying(x: Any, axes: Sequence[Hashable]) -> Any:
    """`x` typed as varying over `axes`."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


# -- Meshes with axes that are not manual ----------------------------------------------------------


def other_axes(where: Where) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """(Auto, Explicit) axes of several devices that the shard_map around a call left alone."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(where.axes) & set(mesh.manual_axes):
        return (), ()
    large = {a for a in mesh.axis_names if mesh.shape[a] > 1}
    auto = tuple(a for a in mesh.auto_axes if a in large)
    return auto, tuple(a for a in mesh.explicit_axes if a in large)


def over_explicit_axes(
    f: Callable[..., Sequence[Any]], operands: Sequence[Any], where: Where
) -> Sequence[Any]:
    """`f(*operands)`, inside a shard_map over Explicit axes that are not manual yet.

    XLA would gather the operand of a custom call over axes that it partitions itself. For Explicit
    axes the type says how the operand is laid out, so that they can be made manual around a
    shape-preserving call.
    """
    _, explicit = other_axes(where)
    if not explicit:
        return f(*operands)
    specs = tuple(jax.typeof(x).sharding.spec for x in operands)
    wrapped = jax.shard_map(
        lambda *xs: tuple(f(*xs)),
        axis_names=set(explicit),
        in_specs=specs,
        out_specs=specs,
        check_vma=bool(where.checked),
    )
    return wrapped(*operands)


# -- Lowering --------------------------------------------------------------------------------------


def partition_groups(mesh: Any, where: Where) -> list[list[int]]:
    """The groups of partition ids (positions in the mesh, row-major) that reduce among themselves.

    Args:
      mesh: a Mesh or AbstractMesh.
      where: its axes are axes of the mesh.

    Example: a (2, 3) mesh over ("x", "y") gives [[0, 3], [1, 4], [2, 5]] over "x".
    """
    ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
    positions = [mesh.axis_names.index(axis) for axis in where.axes]
    rows = np.moveaxis(ids, positions, range(-len(positions), 0))
    rows = rows.reshape(-1, np.prod([mesh.axis_sizes[i] for i in positions], dtype=int)).tolist()
    if where.groups is None:
        return rows
    return [[row[i] for i in group] for row in rows for group in where.groups]


def devices_of(mesh: Any) -> tuple[list[int], list[int]]:
    """(global device id, process index) by partition id; both empty for an abstract mesh."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return [], []
    devices = list(mesh.devices.flat)
    return [d.id for d in devices], [d.process_index for d in devices]

"""From axis names to the ranks of a call, while tracing."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

from jaxring._src import _compat
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
      world_size: its size while tracing, for the shapes of calls that gather or scatter; else 0.
    """

    axes: tuple[Hashable, ...] = ()
    groups: Groups | None = None
    checked: tuple[Hashable, ...] = ()
    communicator: str = ""
    world_size: int = 0

    def without(self, *axes: Hashable) -> Where:
        """The rest of the call when these axes are done with."""
        return dataclasses.replace(
            self,
            axes=tuple(a for a in self.axes if a not in axes),
            checked=tuple(a for a in self.checked if a not in axes),
        )

    def unsized(self) -> Where:
        """The same for calls whose shapes do not depend on the world size, so that a Communicator
        that has lost or won ranks means no new program."""
        return dataclasses.replace(self, world_size=0)

    def unchecked(self) -> Where:
        """The part of the call over axes that types do not track."""
        return self.without(*self.checked)


def resolve(
    axis_name: Any, axis_index_groups: Any, call: str, *, groups_typed: bool = False
) -> Where:
    """Checks the arguments that say who takes part.

    Args:
      call: begins the error messages.
      groups_typed: whether check_vma=True can type the result with axis_index_groups, as it can if
        the result varies anyway.

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
        return Where(communicator=axis_name.key, world_size=axis_name.world_size)
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        _check_name(axis, axes, call)
    tracked = [axis for axis in axes if _varies_over(_axis_index(axis, call)[0], axis)]
    checked = tuple(a for a in tracked if a in manual_axes())
    untyped = () if groups_typed else checked
    return Where(axes, _check_groups(axis_index_groups, axes, untyped, call), checked)


def _check_name(axis: Any, axes: tuple[Any, ...], call: str) -> None:
    if isinstance(axis, int):
        raise UsageError(
            f"{call}: {axis} is a positional axis; reduce it before the call (jnp.sum(x, {axis}))"
            " and pass axis names"
        )
    if hasattr(axis, "dtype"):
        raise UsageError(
            f"{call}: expected an axis name or a jaxring.Communicator after the operand, got an"
            " array; write it as jaxring.allreduce(x, 'dp')"
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
    given: Any, axes: tuple[Any, ...], untyped: tuple[Any, ...], call: str
) -> Groups | None:
    if given is None:
        return None
    if untyped:
        raise UsageError(
            f"{call}: with axis_index_groups the result differs between groups, which"
            " check_vma=True cannot type; pass check_vma=False to jax.shard_map, or reduce over a"
            " sub-axis of the mesh"
        )
    try:
        groups = tuple(tuple(operator.index(i) for i in group) for group in given)
    except TypeError:
        raise UsageError(
            f"{call}: axis_index_groups must be lists of integers, got {given!r}; pass for example"
            " [[0, 1], [2, 3]]"
        ) from None
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


def group_size(where: Where, call: str) -> int:
    """The number of ranks of a group, while tracing, which the shape of a result may contain.

    Raises:
      UsageError: the groups differ in size.
    """
    if where.communicator:
        return where.world_size
    sizes = group_sizes(where)
    if len(sizes) > 1:
        raise UsageError(
            f"{call}: axis_index_groups have the sizes {sorted(sizes)}, but the shape of the result"
            " depends on it; make all groups equally large"
        )
    return next(iter(sizes))


def check_rank(rank: Any, where: Where, argument: str, call: str) -> int:
    """The rank that an argument such as `root` names.

    Raises:
      UsageError: it is no integer, or none of the ranks.
    """
    size = group_size(where, call)
    try:
        number = operator.index(rank)
    except TypeError:
        raise UsageError(
            f"{call}: {argument} must be an integer known while tracing, got {rank!r}; pass one of"
            f" 0..{size - 1}"
        ) from None
    if not 0 <= number < size:
        raise UsageError(
            f"{call}: {argument} {number} is out of range for {size} ranks; pass one of"
            f" 0..{size - 1}"
        )
    return number


# -- A vmap axis among the axes of a call ----------------------------------------------------------


def around(where: Where, axis: Hashable, call: str) -> tuple[int, int]:
    """The numbers of ranks that the axes before and after `axis` make: it is in the middle of a
    row-major order.

    Raises:
      UsageError: the call has axis_index_groups, which cut across.
    """
    if where.groups is not None:
        raise UsageError(
            f"{call}: axis_index_groups do not go with the vmap axis {axis!r}; split the axis in"
            " two (jax.vmap of jax.vmap) and name one of them"
        )
    i = where.axes.index(axis)
    return lax.axis_size(where.axes[:i]), lax.axis_size(where.axes[i + 1 :])


def rank(where: Where) -> Any:
    """The rank of this device, as a traced scalar; for calls over axes without groups."""
    return lax.axis_index(where.axes)


def split_rank(rank: int, where: Where, part: Sequence[Hashable]) -> tuple[int, int]:
    """(rank along the axes `part`, rank along the rest) of a rank along all axes of the call."""
    sizes = [lax.axis_size(a) for a in where.axes]
    ranks = [0, 0]
    for axis, size, index in zip(where.axes, sizes, np.unravel_index(rank, sizes), strict=True):
        side = axis not in part
        ranks[side] = ranks[side] * size + int(index)
    return ranks[0], ranks[1]


# -- Types -----------------------------------------------------------------------------------------


def varying_result(aval: Any, where: Where) -> Any:
    """The type of an operand after `cast_varying(x, where.checked)`."""
    axes = frozenset(where.checked)
    kind = _compat.reduced_over(aval.manual_axis_type, axes)
    return aval.update(manual_axis_type=kind.update(varying=kind.varying | axes))


def equal_result(aval: Any, where: Where, *, reduced: bool = False) -> Any:
    """The type of a result that is equal on all ranks: invariant, or as JAX calls it, reduced."""
    kind = aval.manual_axis_type
    axes = frozenset(where.checked)
    kind = kind.update(
        varying=kind.varying - axes, reduced=kind.reduced | axes if reduced else kind.reduced
    )
    return aval.update(manual_axis_type=kind)


def effects(where: Where) -> set[Any]:
    """The effects that say that the axes are in use."""
    return set().union(*(_axis_index(axis, "jaxring")[1] for axis in where.axes))


def with_rows(aval: Any, size: int) -> Any:
    """The type of `size` such values, stacked: one row for each rank."""
    sharding = aval.sharding.update(spec=jax.P(None, *aval.sharding.spec))
    return aval.update(shape=(size, *aval.shape), sharding=sharding)


def row_of(aval: Any) -> Any:
    """The type of one row."""
    sharding = aval.sharding.update(spec=jax.P(*aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], sharding=sharding)


def cast_varying(x: Any, axes: Sequence[Hashable]) -> Any:
    """`x` typed as varying over `axes`."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x

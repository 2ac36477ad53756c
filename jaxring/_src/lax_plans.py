"""How each collective of jax.lax becomes one of ours: shapes, op, and what is rearranged around it.

A planner is (operand's type, result's type, groups, parameters of lax's primitive) -> Plan, or None
for a call that we cannot serve. The parameters are those of jax 0.10.2 ... 0.12.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxring._src import native_facts, reductions


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call of ours in the place of one of lax's.

    Attributes:
      name: what errors call it.
      sent, received: shapes of the operand and the result of our call.
      before, after: from lax's operand to ours, from our result to lax's; None where equal.
      op, root, permutation: as for `custom_call.emit`.
      layout: as in calls.How.
    """

    name: str
    collective: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    before: Callable[[Any], Any] | None = None
    after: Callable[[Any], Any] | None = None
    op: str = ""
    root: int = 0
    permutation: Sequence[int] = ()
    layout: str = ""


Planner = Callable[[Any, Any, list[list[int]], dict[str, Any]], Plan | None]


def _reduction(op: str, name: str) -> Planner:
    def plan(aval: Any, result: Any, groups: list[list[int]], params: Any) -> Plan | None:
        own = _op_of(op, aval.dtype)
        return Plan(name, "allreduce", aval.shape, aval.shape, op=own) if own else None

    return plan


def _reduce_scatter(aval: Any, result: Any, groups: list[list[int]], params: Any) -> Plan | None:
    p, dim = _even(groups), params["scatter_dimension"]
    op = _op_of("sum", aval.dtype)
    if not (p and op):
        return None
    part = _with_size(aval.shape, dim, aval.shape[dim] // p)
    return Plan(
        "lax.psum_scatter",
        "reduce_scatter",
        (p, *part),
        part,
        lambda x: _rows_of(x, dim, p),
        None if params["tiled"] else lambda y: y.reshape(result.shape),
        op,
        layout=f"scatter_dimension={dim}",
    )


def _all_gather(aval: Any, result: Any, groups: list[list[int]], params: Any) -> Plan | None:
    p, dim = _even(groups), params["all_gather_dimension"]
    if not (p and _is_ours(aval.dtype)):
        return None
    place = _side_by_side if params["tiled"] else functools.partial(_move, source=0)
    return Plan(
        "lax.all_gather",
        "all_gather",
        aval.shape,
        (p, *aval.shape),
        after=lambda y: place(y, target=dim),
    )


def _all_to_all(aval: Any, result: Any, groups: list[list[int]], params: Any) -> Plan | None:
    p, split, concat = _even(groups), params["split_axis"], params["concat_axis"]
    if not (p and _is_ours(aval.dtype)):
        return None
    shape = (p, *_with_size(aval.shape, split, aval.shape[split] // p))
    return Plan(
        "lax.all_to_all",
        "all_to_all",
        shape,
        shape,
        lambda x: _rows_of(x, split, p),
        lambda y: _side_by_side(y, concat),
        layout=f"split_axis={split}",
    )


def _ppermute(aval: Any, result: Any, groups: list[list[int]], params: Any) -> Plan | None:
    p, perm = len(groups[0]), params["perm"]
    # Lax sorts the group, and newer versions refuse one that is not sorted.
    if not _is_ours(aval.dtype) or any(g != sorted(g) for g in groups):
        return None
    sources = [source % p for source, _ in perm]
    targets = [target % p for _, target in perm]
    if len(set(sources)) < len(perm) or len(set(targets)) < len(perm):
        return None  # lax has the error for it
    permutation = [-1] * p
    for source, target in zip(sources, targets, strict=True):
        permutation[source] = target
    return Plan("lax.ppermute", "ppermute", aval.shape, aval.shape, permutation=tuple(permutation))


def _pbroadcast(aval: Any, result: Any, groups: list[list[int]], params: Any) -> Plan | None:
    p, source = len(groups[0]), params["source"]
    if not _is_ours(aval.dtype) or not -p <= source < p:
        return None
    return Plan("lax.pbroadcast", "broadcast", aval.shape, aval.shape, root=source % p)


# Primitive of lax's, without its "_p"; those that a JAX version lacks are skipped.
PLANS: dict[str, Planner] = {
    "psum": _reduction("sum", "lax.psum"),
    "psum_invariant": _reduction("sum", "lax.psum"),
    "unreduced_psum": _reduction("sum", "lax.psum"),
    "pmax": _reduction("max", "lax.pmax"),
    "unreduced_pmax": _reduction("max", "lax.pmax"),
    "pmin": _reduction("min", "lax.pmin"),
    "unreduced_pmin": _reduction("min", "lax.pmin"),
    "reduce_scatter": _reduce_scatter,
    "unreduced_reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "all_gather_reduced": _all_gather,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
}


# -- What we can serve -----------------------------------------------------------------------------


def _is_ours(dtype: Any) -> bool:
    return str(dtype) in native_facts.lists()["dtypes"]


def _op_of(op: str, dtype: Any) -> str | None:
    """Our op for lax's reduction of a dtype, or None. Lax's max of bool is "or"."""
    if dtype == np.bool_:
        op = {"max": "or", "min": "and"}.get(op, op)
    return op if _is_ours(dtype) and reductions.has_meaning(op, dtype) else None


def _even(groups: list[list[int]]) -> int:
    """The size of the groups, or 0 when they differ."""
    return len(groups[0]) if len({len(g) for g in groups}) == 1 else 0


# -- Shapes ----------------------------------------------------------------------------------------


def _with_size(shape: Sequence[Any], dim: int, size: Any) -> tuple[Any, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _move(x: Any, source: int, target: int) -> Any:
    order = [i for i in range(x.ndim) if i != source]
    order.insert(target, source)
    return lax.transpose(x, order)


def _rows_of(x: Any, dim: int, p: int) -> Any:
    """`x` cut along `dim` into p parts, stacked in a new first dimension."""
    parts = x.reshape(*x.shape[:dim], p, x.shape[dim] // p, *x.shape[dim + 1 :])
    return _move(parts, dim, 0)


def _side_by_side(y: Any, target: int) -> Any:
    """The inverse: the rows of `y` put side by side along dimension `target` of a row."""
    p, *row = y.shape
    return _move(y, 0, target).reshape(_with_size(row, target, p * row[target]))

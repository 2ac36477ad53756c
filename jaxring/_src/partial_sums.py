"""Values that JAX types as unreduced: every rank holds its term of a sum that is still to be made.

With jax.sharding's Explicit axes a matrix product may give one, as may jax.lax.pcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxring._src import axes, primitive
from jaxring._src.axes import Where
from jaxring.errors import UsageError


def as_terms(x: Any, op: str, where: Where, call: str) -> Any:
    """`x`, if it is unreduced over axes of the call, typed as what it holds: the rank's own term.

    Raises:
      UsageError: the call reduces with another op than the one that is still to be done.
    """
    kind = jax.typeof(x).manual_axis_type
    unreduced = tuple(a for a in where.checked if a in kind.unreduced)
    if not unreduced:
        return x
    pending = getattr(getattr(kind, "unreduced_kind", None), "name", "sum")
    if pending != ("sum" if op == "mean" else op):
        raise UsageError(
            f"{call}: the operand is an unreduced {pending} over {unreduced}, which op {op!r}"
            f" cannot complete; reduce it with op {pending!r} first"
        )
    return _bind(x, where=Where(unreduced, checked=unreduced), back=False)[0]


def _bind(*xs: Any, where: Where, back: bool) -> Sequence[Any]:
    return partial_sums_p.bind(*xs, where=where, back=back)


# -- The five rules, of a cast that does nothing: from unreduced to varying, or (`back`, its
# transpose, where the ranks' values are known to be equal) from varying to reduced ----------------


def _abstract_eval(*avals: Any, where: Where, back: bool) -> tuple[list[Any], set[Any]]:
    if not back:
        return [axes.varying_result(aval, where) for aval in avals], set()
    return [axes.equal_result(aval, where, reduced=True) for aval in avals], set()


def _batch(axis_data: Any, xs: Any, dims: Any, *, where: Where, back: bool) -> Any:
    return _bind(*xs, where=where, back=back), dims


def _jvp(primals: Any, tangents: Any, *, where: Where, back: bool) -> Any:
    return primitive.jvp_of_linear(
        lambda *xs: _bind(*xs, where=where, back=back), primals, tangents
    )


def _transpose(cotangents: Any, *xs: Any, where: Where, back: bool) -> Any:
    return primitive.transpose_of_linear(
        lambda *cts: _bind(*cts, where=where, back=not back), cotangents, xs
    )


partial_sums_p = primitive.define_cast(
    "partial_sums",
    abstract_eval=_abstract_eval,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)

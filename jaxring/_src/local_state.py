"""Optimizer state that each rank has for itself, under types that say it is equal on all ranks.

What a rank has accumulated, or lost by compression, differs between ranks. In shard_map such state
would have to go in and out with other specs than the rest of an optimizer's state, which is equal
everywhere; and a scan that carries it would refuse a type that changes on the way. So it keeps the
type it came with: behind a spec P() every device keeps its own values, which nobody but the
transformations of jaxring.optim reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jaxring._src import axes, primitive
from jaxring._src.axes import Where


def kept_as(xs: Any, like: Any) -> Any:
    """The leaves of `xs`, each rank's own, typed as those of `like` are."""

    def kept(x: Any, like: Any) -> Any:
        over = tuple(axes.varying_axes(x) - axes.varying_axes(like))
        return _bind(x, over=over)[0] if over else x

    return jax.tree.map(kept, xs, like)


def own(xs: Any, where: Where) -> Any:
    """The leaves of `xs` typed as what they are: different on each rank."""
    return jax.tree.map(lambda x: axes.cast_varying(x, where.checked), xs)


def _bind(*xs: Any, over: tuple[Hashable, ...]) -> Sequence[Any]:
    return local_state_p.bind(*xs, over=over)


# -- The five rules, of a cast from varying to equal that does nothing -----------------------------


def _abstract_eval(*avals: Any, over: tuple[Hashable, ...]) -> tuple[list[Any], set[Any]]:
    where = Where(over, checked=over)
    return [axes.equal_result(aval, where) for aval in avals], set()


def _batch(axis_data: Any, xs: Any, dims: Any, *, over: tuple[Hashable, ...]) -> Any:
    return _bind(*xs, over=over), dims


def _jvp(primals: Any, tangents: Any, *, over: tuple[Hashable, ...]) -> Any:
    return primitive.jvp_of_linear(lambda *xs: _bind(*xs, over=over), primals, tangents)


def _transpose(cotangents: Any, *xs: Any, over: tuple[Hashable, ...]) -> Any:
    return primitive.transpose_of_linear(
        lambda *cts: [axes.cast_varying(ct, over) for ct in cts], cotangents, xs
    )


local_state_p = primitive.define_cast(
    "local_state",
    abstract_eval=_abstract_eval,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)

"""Ranks with different numbers of batches: those that have none left go on with zeros that do not
count, until all are done."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxring import errors
from jaxring._src.allreduce import allreduce
from jaxring.communicator import Communicator


def join(batches: Iterable[Any], comm: Communicator) -> Iterator[tuple[Any, jax.Array]]:
    """Goes through `batches` until all ranks of `comm` have gone through theirs.

    What Horovod's and DDP's joins are for: without it, the ranks that have more batches would wait
    in vain for the one that has fewer, which is a MismatchError.

    Every rank must iterate over it, and make the same collective calls for each item.

    Args:
      batches: this rank's pytrees of arrays; there may be none, unless so it is on all ranks.
      comm: the communicator of those who must wait for each other.

    Yields: (batch, live). `live` is a float32 scalar: 1 with a batch of this rank's; 0 with zeros
      of the shapes of this rank's last batch (of another rank's first one, if there was none).

    Raises: UsageError: `batches` cannot be iterated over, or a rank without batches has no other to
      learn the shapes from.

    Costs a small allreduce for each item, on which the ranks agree to go on.

    Example::

        for batch, live in jaxring.elastic.join(my_batches, comm):
            params = step(comm, params, batch, live)

    where step has ``grads = jaxring.elastic.mean_of_live(grads, live, comm)``.
    """
    try:
        iterator = iter(batches)
    except TypeError:
        raise errors.UsageError(
            "elastic.join: expected an iterable of batches first, got "
            f"{type(batches).__name__}; write for example jaxring.elastic.join(my_batches, comm)"
        ) from None
    batch, found = _next(iterator)
    spare = _zeros(batch) if found else None
    if _sum(comm, not found):  # some ranks have nothing: they must learn what zeros to make
        for form in comm.all_gather_object(_form(batch) if found else None):
            if spare is None and form is not None:
                spare = jax.tree.map(lambda leaf: np.zeros(*leaf), form, is_leaf=_is_form)
    while _sum(comm, found):
        yield (batch, jnp.float32(1)) if found else (spare, jnp.float32(0))
        if found:
            spare = _zeros(batch)
            batch, found = _next(iterator)


def mean_of_live(x: Any, live: Any, comm: Communicator, *, name: str | None = None) -> Any:
    """The mean of `x` over those ranks whose `live` is not 0, on every rank; inside jit.

    Args:
      x: a pytree of arrays, such as gradients. Of a rank that is not live nothing counts, NaN
        neither.
      live: as `join` yields it; a weight other than 1 counts as such.
      comm: the communicator.
      name: appears in errors, timeline and profiler.

    Returns: sum(live * x) / sum(live), the structure and dtypes of `x`. DDP's and Horovod's joins
      divide by the number of all ranks instead: that is
      ``jaxring.allreduce(jax.tree.map(lambda g: g * live, x), comm, "mean")``.
    """
    leaves, structure = jax.tree.flatten(x)
    wide = [jnp.promote_types(jnp.result_type(leaf), jnp.float32) for leaf in leaves]
    parts = [
        jnp.where(live != 0, jnp.asarray(leaf).astype(to) * live, 0).astype(to)
        for leaf, to in zip(leaves, wide, strict=True)
    ]
    *sums, count = allreduce([*parts, jnp.asarray(live, jnp.float32)], comm, name=name)
    means = [
        (total / count).astype(jnp.result_type(leaf))
        for total, leaf in zip(sums, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, means)


def _next(iterator: Iterator[Any]) -> tuple[Any, bool]:
    for batch in iterator:
        return batch, True
    return None, False


def _zeros(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(np.shape(leaf), jnp.result_type(leaf)), batch)


def _form(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: (np.shape(leaf), np.dtype(jnp.result_type(leaf))), batch)


def _is_form(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], np.dtype)


def _sum(comm: Communicator, here: bool) -> int:
    """How many ranks say so."""
    try:
        return int(_total(comm, np.int32(here)))
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        raise errors.from_exception(e) from e


@functools.partial(jax.jit, static_argnums=0)
def _total(comm: Communicator, here: Any) -> jax.Array:
    return allreduce(here, comm, name="elastic join")

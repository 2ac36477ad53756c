"""Cutting a data set into one part for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxring import errors


def share_of(dataset: Any, rank: int, world_size: int) -> Any:
    """Part `rank` of `world_size` contiguous parts of `dataset`; see Communicator.shard."""
    if not _is_structure(dataset):
        return _cut(dataset, rank, world_size)
    lengths = {np.shape(leaf)[0] for leaf in jax.tree.leaves(dataset)}
    if len(lengths) > 1:
        raise errors.UsageError(
            "shard: expected arrays with the same first dimension, got "
            f"{sorted(lengths)}; cut them one by one"
        )
    return jax.tree.map(lambda leaf: _cut(leaf, rank, world_size), dataset)


def _is_structure(dataset: Any) -> bool:
    """Whether it is a container of arrays to cut, not a sequence of samples.

    A list is a sequence, also a list of arrays; a tuple such as (images, labels) is a container."""
    if isinstance(dataset, list | str | bytes | range | Iterator) or _is_array(dataset):
        return False
    leaves = jax.tree.leaves(dataset)
    is_container = not (len(leaves) == 1 and leaves[0] is dataset)
    return is_container and bool(leaves) and all(_is_array(leaf) for leaf in leaves)


def _is_array(x: Any) -> bool:
    return len(getattr(x, "shape", ())) > 0


def _cut(dataset: Any, rank: int, world_size: int) -> Any:
    try:
        size = len(dataset)
    except TypeError:
        raise errors.UsageError(
            "shard: expected a sequence, an array or a pytree of arrays, got "
            f"{type(dataset).__name__}; for a stream take every world_size-th item"
        ) from None
    base, longer = divmod(size, world_size)  # the first `longer` ranks take one more
    start = rank * base + min(rank, longer)
    stop = start + base + (rank < longer)
    try:
        return dataset[start:stop]
    except TypeError:  # data sets that know single indices only
        return [dataset[i] for i in range(start, stop)]

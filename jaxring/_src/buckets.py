"""Which leaves of a pytree travel together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any


def size_bytes(x: Any) -> int:
    """The size of an array or its type; 0 if it is symbolic, as in jax.export."""
    return x.size * x.dtype.itemsize if isinstance(x.size, int) else 0


def pack(
    kinds: Sequence[Hashable], sizes_bytes: Sequence[int], limit_bytes: int
) -> list[list[int]]:
    """Splits leaves into buckets of one kind and of at most `limit_bytes` each, in order.

    Args:
      kinds: what leaves of one bucket must share, such as the dtype.
      sizes_bytes: the leaves' sizes; one above the limit gets a bucket of its own.
      limit_bytes: the setting `bucket_bytes`.

    Returns:
      Lists of positions, ordered by their first leaf.

    Example: ``pack("aab", [3, 3, 1], 4)`` is ``[[0], [1], [2]]``; a limit of 6 gives
    ``[[0, 1], [2]]``.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for i, (kind, size) in enumerate(zip(kinds, sizes_bytes, strict=True)):
        bucket, filled = open_buckets.get(kind, (None, 0))
        if bucket is None or filled + size > limit_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[kind] = (bucket, filled + size)
    return buckets


def pack_backward(
    kinds: Sequence[Hashable], sizes_bytes: Sequence[int], limit_bytes: int
) -> list[list[int]]:
    """As `pack`, filled from the last leaf on, whose gradient the backward pass has first."""
    last = len(kinds) - 1
    reverse = pack(kinds[::-1], sizes_bytes[::-1], limit_bytes)
    return [[last - i for i in bucket[::-1]] for bucket in reverse]

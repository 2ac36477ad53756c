"""Reductions of which fewer bytes travel, with what is lost kept for the next one.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what compression takes from an operand
is added to the operand of the next reduction, so that nothing is lost for good.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxring._src import axes, buckets, calls, reductions
from jaxring._src.all_gather import all_gather
from jaxring._src.all_to_all import all_to_all
from jaxring._src.allreduce import of_pytree
from jaxring.communicator import Communicator
from jaxring.config import config
from jaxring.errors import UsageError

NAMES = ("bf16", "fp16", "int8")
_NARROW = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
# Elements that share a scale: 4 bytes for 256, and no leaf shares one with another.
BLOCK = 256


def check(compression: Any, op: str, algorithm: str, call: str) -> None:
    """UsageError if there is no such compression, or not of this op or by this algorithm."""
    if compression is None:
        return
    if compression not in NAMES:
        raise UsageError(
            f"{call}: unknown compression {compression!r}; use {calls.one_of(NAMES)}, or None"
        )
    if not reductions.is_linear(op):
        raise UsageError(
            f"{call}: op {op!r} does not go with compression, since what it loses could not be"
            " added to a later result; use mean or sum, or compression=None"
        )
    if compression == "int8" and algorithm != "auto":
        raise UsageError(
            f"{call}: int8 travels by all_to_all and all_gather, so algorithm={algorithm!r} cannot"
            " carry it; leave algorithm out"
        )


def check_dtypes(tree: Any, call: str) -> None:
    """UsageError if there are leaves that cannot be compressed."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise UsageError(
                f"{call}: leaf {jax.tree_util.keystr(path)} is {dtype}, which compression cannot"
                " round; leave it out with optax.masked, or use compression=None"
            )


def no_error(tree: Any) -> Any:
    """What is lost before the first reduction: zeros, in float32 or wider."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(x)), tree)


def wide_dtype(x: Any) -> Any:
    return jnp.promote_types(jnp.result_type(x), jnp.float32)


def reduce(
    tree: Any, error: Any, compression: str, axis_name: Any, op: str, algorithm: str, name: Any
) -> tuple[Any, Any]:
    """(reduction of `tree`, what this rank has lost), both with its structure.

    Args:
      tree: floats, different on each rank.
      error: what the last reduction gave, or `no_error`.
    """
    leaves, structure = jax.tree.flatten(tree)
    errors = structure.flatten_up_to(error)
    wide = [x + e for x, e in zip(leaves, errors, strict=True)]
    if compression == "int8":
        results, lost = _in_blocks(wide, axis_name, op, name)
    else:
        results, lost = _narrowed(wide, _NARROW[compression], axis_name, op, algorithm, name)
    results = [y.astype(x.dtype) for x, y in zip(leaves, results, strict=True)]
    return jax.tree.unflatten(structure, results), jax.tree.unflatten(structure, lost)


def _lost(wide: Any, sent: Any) -> Any:
    """What was not sent; nothing where that is no number, lest NaN stays for good."""
    difference = wide - sent
    return jnp.where(jnp.isfinite(difference), difference, 0)


# -- 16 bits: the engine sums them in float32 and rounds once --------------------------------------


def _narrowed(
    wide: Sequence[Any], dtype: Any, axis_name: Any, op: str, algorithm: str, name: Any
) -> tuple[Sequence[Any], list[Any]]:
    limit = float(jnp.finfo(dtype).max)

    def narrow(x: Any) -> Any:  # what is too large is sent in parts; infinities remain
        return jnp.where(jnp.isinf(x), x, jnp.clip(x, -limit, limit)).astype(dtype)

    sent = [narrow(x) for x in wide]
    call = calls.describe("optim", name)
    results = of_pytree(sent, axis_name, op, algorithm, None, name, call, overlaps=True)
    return results, [_lost(x, s.astype(x.dtype)) for x, s in zip(wide, sent, strict=True)]


# -- 8 bits in blocks: all_to_all of parts, sums in float32, all_gather of the results -------------


def _in_blocks(
    wide: Sequence[Any], axis_name: Any, op: str, name: Any
) -> tuple[list[Any], list[Any]]:
    results, lost = list(wide), list(wide)
    sizes_bytes = [buckets.size_bytes(x) for x in wide]
    for bucket in buckets.pack_backward([""] * len(wide), sizes_bytes, config.bucket_bytes):
        chosen = [wide[i] for i in bucket]
        ys, es = _reduced_in_blocks(_padded(chosen), axis_name, op, name)
        for i, y, e in zip(bucket, _cut(ys, chosen), _cut(es, chosen), strict=True):
            results[i], lost[i] = y, e
    return results, lost


def _padded(xs: Sequence[Any]) -> Any:
    """One float32 vector of all leaves, each filled up to whole blocks."""
    flat = [x.astype(np.float32).ravel() for x in xs]
    return jnp.concatenate([jnp.pad(x, (0, -x.size % BLOCK)) for x in flat])


def _cut(vector: Any, like: Sequence[Any]) -> list[Any]:
    """The leaves of a padded vector."""
    starts = np.cumsum([0] + [x.size + -x.size % BLOCK for x in like])
    return [
        lax.slice_in_dim(vector, start, start + x.size).reshape(x.shape).astype(x.dtype)
        for start, x in zip(starts.tolist(), like, strict=False)
    ]


def _reduced_in_blocks(vector: Any, axis_name: Any, op: str, name: Any) -> tuple[Any, Any]:
    """(reduction, what was lost here) of a float32 vector of whole blocks.

    Rank r sums part r of all ranks. What it loses when it compresses that sum is lost for all; it
    adds it to its own next operand, times the ranks that a mean is divided by.
    """
    where = axes.resolve(axis_name, None, "jaxring.optim")
    ranks, size = axes.group_size(where, "jaxring.optim"), vector.size
    if size == 0:
        return vector, vector
    rows = jnp.pad(vector, (0, -size % (ranks * BLOCK))).reshape(ranks, -1)
    sent = quantised(rows)
    came = all_to_all(sent, axis_name, 0, 0, name=name)
    total = functools.reduce(jnp.add, list(dequantised(came)))  # in rank order
    if op == "mean":
        total = total / ranks
    result = quantised(total[None])
    gathered = all_gather(result[0], axis_name, to="invarying", name=name)
    lost, rank = _lost(rows, dequantised(sent)), _rank(axis_name)
    lost_of_sum = _lost(total, dequantised(result)[0]) * (ranks if op == "mean" else 1)
    own = lax.dynamic_index_in_dim(lost, rank, keepdims=False) + lost_of_sum
    lost = lax.dynamic_update_index_in_dim(lost, own, rank, 0)
    return dequantised(gathered).ravel()[:size], lost.ravel()[:size]


def _rank(axis_name: Any) -> Any:
    if isinstance(axis_name, Communicator):
        return axis_name.axis_index()
    return lax.axis_index(axis_name)


def quantised(rows: Any) -> Any:
    """float32[r, n] as int8[r, n + n / 64]: each block's elements in units of its largest one's
    127th part, then these units. n is whole blocks."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    units = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    numbers = jnp.round(blocks / jnp.where(units > 0, units, 1)).astype(np.int8)
    units = lax.bitcast_convert_type(units[..., 0], np.int8)
    return jnp.concatenate([numbers.reshape(rows.shape), units.reshape(len(rows), -1)], axis=1)


def dequantised(rows: Any) -> Any:
    """The inverse of `quantised`, but for rounding; no numbers where a block held one that is not
    finite."""
    count = rows.shape[1] * BLOCK // (BLOCK + 4)
    units = lax.bitcast_convert_type(rows[:, count:].reshape(len(rows), -1, 4), np.float32)
    return (rows[:, :count].reshape(len(rows), -1, BLOCK) * units[..., None]).reshape(
        len(rows), count
    )

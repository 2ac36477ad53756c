"""What a Communicator exchanges outside traced code: Python objects and arrays of uneven lengths.

They travel as bytes through the same collectives as everything else, so that they keep their order
among the programs that a device runs.
"""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxring import errors
from jaxring._src.all_gather import all_gather
from jaxring._src.broadcast import broadcast
from jaxring.communicator import Communicator, extend

_SIZE_BYTES = 8
_SMALLEST_BYTES = 256


def broadcast_object(comm: Communicator, obj: Any, root: int) -> Any:
    """See Communicator.broadcast_object."""
    if not 0 <= root < comm.world_size:
        raise errors.UsageError(
            f"broadcast_object: root {root} is no rank of {comm!r}; expected 0 <= root <"
            f" {comm.world_size}"
        )
    data = _dumped(obj, "broadcast_object") if comm.rank == root else b""
    sizes = _sizes(comm, len(data), "broadcast_object")
    padded = _padded(np.frombuffer(data, np.uint8), sizes[root])
    received = np.asarray(broadcast(jnp.asarray(padded), comm, root, name="broadcast_object"))
    return obj if comm.rank == root else pickle.loads(received[: sizes[root]].tobytes())


def all_gather_object(comm: Communicator, obj: Any) -> list[Any]:
    """See Communicator.all_gather_object."""
    data = np.frombuffer(_dumped(obj, "all_gather_object"), np.uint8)
    sizes = _sizes(comm, data.size, "all_gather_object")
    gathered = all_gather(jnp.asarray(_padded(data, max(sizes))), comm, name="all_gather_object")
    rows = np.asarray(gathered)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def all_gather_uneven(comm: Communicator, array: Any) -> jax.Array:
    """See Communicator.all_gather_uneven."""
    x = np.asarray(array)
    if x.ndim == 0:
        raise errors.UsageError(
            "all_gather_uneven: expected an array with a first dimension, got a scalar; use"
            " all_gather_object or reshape it to (1,)"
        )
    kinds = all_gather_object(comm, (str(x.dtype), x.shape))
    for rank, (dtype, shape) in enumerate(kinds):
        if dtype != str(x.dtype) or shape[1:] != x.shape[1:]:
            raise errors.MismatchError(
                f"all_gather_uneven: rank {comm.rank} has {x.dtype}{list(x.shape)} and rank {rank}"
                f" has {dtype}{list(shape)}; only the first dimension may differ",
                rank=rank,
                signatures=[f"{kind}{list(of)}" for kind, of in kinds],
            )
    lengths = [shape[0] for _, shape in kinds]
    padded = np.zeros((max(lengths), *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    rows = all_gather(jnp.asarray(padded), comm, name="all_gather_uneven")
    return jnp.concatenate([row[:length] for row, length in zip(rows, lengths, strict=True)])


def _dumped(obj: Any, call: str) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as e:  # whatever the object's own code raises
        raise errors.UsageError(f"{call}: {type(obj).__name__} cannot be pickled: {e}") from e


def _sizes(comm: Communicator, size_bytes: int, call: str) -> list[int]:
    """The sizes on all ranks. As bytes: without jax_enable_x64 there are no 64-bit integers."""
    mine = np.frombuffer(size_bytes.to_bytes(_SIZE_BYTES, "little"), np.uint8)
    rows = np.asarray(all_gather(jnp.asarray(mine), comm, name=call))
    return [int.from_bytes(row.tobytes(), "little") for row in rows]


def _padded(data: np.ndarray, size_bytes: int) -> np.ndarray:
    """`data` and zeros up to a power of two, so that few programs serve all sizes."""
    room = max(_SMALLEST_BYTES, 1 << max(0, size_bytes - 1).bit_length())
    return np.concatenate([data, np.zeros(room - data.size, np.uint8)])


extend(
    broadcast_object=broadcast_object,
    all_gather_object=all_gather_object,
    all_gather_uneven=all_gather_uneven,
)

"""How all ranks of an epoch come to one state: the ranks agree on whose and as of which commit, and
that rank broadcasts it. Old and new ranks, with and without a state of their own, do the same."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxring import errors
from jaxring._src.broadcast import broadcast
from jaxring._src.elastic_state import Standing, State, Values
from jaxring.communicator import Communicator

_SIZE_BYTES = 8
_SMALLEST_BYTES = 1024


def agreed(standings: Sequence[Standing]) -> tuple[int, int]:
    """(rank, commit): from whom the state comes, and as of which commit.

    Of ranks that took part in the newest epoch each has the last commit that counts, perhaps as one
    prepared: if it has returned anywhere, all had prepared it. So what they have in common is the
    smallest of their latest, and it is the last commit that counts. A rank that was left out of
    epochs meanwhile has an older lineage and is not asked.
    """
    newest = max(standing.lineage for standing in standings)
    ranks = [rank for rank, s in enumerate(standings) if s.lineage == newest]
    if newest == 0:  # all are new: what they have committed by themselves is not the others'
        return ranks[0], standings[ranks[0]].latest
    return ranks[0], min(standings[rank].latest for rank in ranks)


def synchronise(
    state: State, comm: Communicator, standings: Sequence[Standing], epoch: int
) -> None:
    """Gives all ranks the same state, each its own copy."""
    root, commit = agreed(standings)
    if comm.rank == root:
        state._keep(commit)
    values = broadcast_values(state._committed.values, comm, root)
    state._adopt(commit, values, epoch)


def broadcast_values(values: Values, comm: Communicator, root: int) -> Values:
    """`root`'s values on all ranks, which have the same structure; shapes, dtypes and whatever is
    no array come from `root`. Arrays stay arrays of JAX or numpy."""
    paths, structure = jax.tree.flatten_with_path(values)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    kinds = [_kind(leaf) for _, leaf in paths]
    told = _broadcast_object((names, kinds) if comm.rank == root else None, comm, root)
    if told[0] != names:
        theirs, ours = sorted(set(told[0]) - set(names)), sorted(set(names) - set(told[0]))
        raise errors.UsageError(
            f"elastic.State: rank {root} has values {theirs} that rank {comm.rank} lacks, and "
            f"lacks {ours}; make State with the same structure on every rank"
        )
    kinds = told[1]
    mine = [leaf for _, leaf in paths] if comm.rank == root else [None] * len(kinds)
    operands = [kind.pack(leaf) for kind, leaf in zip(kinds, mine, strict=True) if kind.travels]
    arrived = iter(jax.block_until_ready(broadcast(operands, comm, root, name="elastic state")))
    leaves = [kind.unpack(next(arrived)) if kind.travels else kind.value for kind in kinds]
    return jax.tree.unflatten(structure, leaves)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a leaf is: "array", "key" (of random numbers), "numpy" or "object", which is pickled."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: Any = None
    value: Any = None  # an object; of a key its implementation

    @property
    def travels(self) -> bool:
        return self.kind != "object"

    def pack(self, leaf: Any) -> jax.Array:
        """The array that travels: of the leaf, or for None one that only has its type."""
        if self.kind == "numpy":  # as bytes, as JAX may not have its dtype
            size = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
            data = np.zeros(size, np.uint8) if leaf is None else np.frombuffer(leaf.tobytes(), "u1")
            return jnp.asarray(data)
        if leaf is None:
            return jnp.zeros(self.shape, self.dtype)
        return jax.random.key_data(leaf) if self.kind == "key" else leaf

    def unpack(self, x: jax.Array) -> Any:
        if self.kind == "numpy":
            return np.frombuffer(np.asarray(x).tobytes(), self.dtype).reshape(self.shape).copy()
        return jax.random.wrap_key_data(x, impl=self.value) if self.kind == "key" else x


def _kind(leaf: Any) -> _Kind:
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
            return _Kind("key", data.shape, data.dtype, str(jax.random.key_impl(leaf)))
        return _Kind("array", leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return _Kind("numpy", leaf.shape, leaf.dtype)
    return _Kind("object", value=leaf)


def _broadcast_object(obj: Any, comm: Communicator, root: int) -> Any:
    """As comm.broadcast_object, but without a gathering of sizes, whose shapes would mean a new
    program for each world size."""
    data = b""
    if comm.rank == root:
        try:
            data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as e:  # whatever the objects' own code raises
            raise errors.UsageError(
                f"elastic.State: a value that is no array cannot be pickled ({e}); keep functions "
                "and the like out of the state"
            ) from e
    size = np.frombuffer(len(data).to_bytes(_SIZE_BYTES, "little"), np.uint8)
    size = np.asarray(broadcast(jnp.asarray(size), comm, root, name="elastic state's size"))
    size_bytes = int.from_bytes(size.tobytes(), "little")
    room = max(_SMALLEST_BYTES, 1 << max(0, size_bytes - 1).bit_length())
    padded = np.zeros(room, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    received = np.asarray(broadcast(jnp.asarray(padded), comm, root, name="elastic state's form"))
    return pickle.loads(received[:size_bytes].tobytes())

"""axis_index and axis_size of communicators: read when the program runs. (After a shrink: in
tests/multiprocess/test_elastic.py; of axes: in tests/test_lax_names.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring.testing import spawn


def places(comm):
    """(rank, size) eagerly, under jit, in a scan, under vmap and grad, of a part of the world."""
    part = comm.split(comm.rank % 2, key=-comm.rank)
    assert part is not None

    @jax.jit
    def under_jit():
        return jaxring.axis_index(comm), comm.axis_index(), jaxring.axis_size(comm)

    def body(carry, _):
        return carry + 1, jaxring.axis_index(part)

    return {
        "eager": (int(jaxring.axis_index(comm)), int(jaxring.axis_size(comm))),
        "jit": [int(x) for x in under_jit()],
        "scan": jax.lax.scan(body, 0, None, length=2)[1].tolist(),
        "part": (part.rank, part.world_size, int(jaxring.axis_size(part))),
        "vmap": jax.vmap(lambda x: x + comm.axis_index())(jnp.arange(2)).tolist(),
        "grad": float(jax.grad(lambda x: x * (comm.axis_index() + 1))(1.0)),
    }


def test_every_rank_has_its_own():
    for rank, got in enumerate(spawn(places, 3)):
        size = 1 + (rank % 2 == 0)
        assert got["eager"] == (rank, 3)
        assert got["jit"] == [rank, rank, 3]
        assert got["part"] == ({0: 1, 1: 0, 2: 0}[rank], size, size)
        assert got["scan"] == [got["part"][0]] * 2
        assert got["vmap"] == [rank, rank + 1]
        assert got["grad"] == rank + 1


def test_types_and_a_closed_communicator():
    with jaxring.init(0, 1) as comm:
        f = jax.jit(lambda: (comm.axis_index(), jaxring.axis_size(comm)))
        assert [x.dtype for x in f()] == [np.int32, np.int32]
        assert "jaxring_place" in f.lower().as_text()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="is closed") as raised:
        jax.block_until_ready(f())
    assert isinstance(jaxring.errors.from_exception(raised.value), jaxring.UsageError)

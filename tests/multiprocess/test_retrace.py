"""Case 6 of the design's list, netket #654: shapes that depend on the rank make one rank trace and
compile again, while the others go on with their executables."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring.testing import spawn


def batch_sizes_differ(comm):
    """What is reduced has the same shape everywhere: only time passes differently."""

    traced = []

    @jax.jit
    def step(w, batch):
        traced.append(batch.shape)
        grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - 0.1 * jaxring.allreduce(grads, comm, "mean")

    w = jnp.ones(3)
    for i in range(6):
        w = step(w, np.ones((4 + i if comm.rank == 1 else 4, 3), np.float32))
    return np.asarray(w), len(traced)


def shapes_differ(comm):
    """The samples themselves are reduced, and rank 1 has one more from the third step on."""
    step = jax.jit(lambda samples: jaxring.allreduce(samples, comm))
    for i in range(5):
        began = time.monotonic()
        try:
            step(np.ones(5 if comm.rank == 1 and i >= 2 else 4, np.float32)).block_until_ready()
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            error = jaxring.errors.from_exception(e)
            return i, type(error).__name__, str(error), time.monotonic() - began
    return None


def both(comm):
    return batch_sizes_differ(comm), shapes_differ(comm)


@pytest.fixture(scope="module")
def ranks():
    return spawn(both, 3, env={"JAXRING_TIMEOUT_S": "40"})


def test_one_rank_that_traces_often(ranks):
    (w0, one), (w1, many), (w2, _) = (first for first, _ in ranks)
    np.testing.assert_array_equal(w0, w1)
    np.testing.assert_array_equal(w0, w2)
    assert (one, many) == (1, 6)


def test_shapes_that_differ_are_reported(ranks):
    for _, (step, kind, message, waited_s) in ranks:
        assert (step, kind) == (2, "MismatchError")
        assert "float32[4]" in message
        assert "float32[5]" in message
        assert waited_s < 20  # known from what they announce, not from the deadline

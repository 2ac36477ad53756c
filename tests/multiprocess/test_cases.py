"""What users of other libraries met, as scenarios; the source stands with each."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring.testing import spawn

PIECE = (4 << 20) // 8  # float64 elements of 4 MiB


def large_pieces_with_delays(comm):
    jax.config.update("jax_enable_x64", True)
    inputs = [
        np.random.default_rng(rank).standard_normal((comm.world_size, PIECE))
        for rank in range(comm.world_size)
    ]
    total = sum(inputs[1:], start=inputs[0])
    delays = np.random.default_rng(100 + comm.rank)
    scatter = jax.jit(lambda x: jaxring.reduce_scatter(x, comm))
    reduce = jax.jit(lambda x: jaxring.allreduce(x, comm))
    x = jnp.asarray(inputs[comm.rank])
    for _ in range(16):
        time.sleep(delays.uniform(0, 0.02))
        mine = scatter(x)
        time.sleep(delays.uniform(0, 0.02))
        everything = reduce(x[0])
        np.testing.assert_array_equal(np.asarray(mine), total[comm.rank])
        np.testing.assert_array_equal(np.asarray(everything), total[0])
        np.testing.assert_array_equal(np.asarray(x), inputs[comm.rank])  # it is only read


def test_large_pieces_are_right_bit_for_bit_and_inputs_untouched():
    """jax #40830: gloo wrote into the caller's send buffer, and sums were wrong now and then."""
    spawn(large_pieces_with_delays, 3)


def half_precision_on_256_ranks(comm):
    del comm
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    algorithms = ("direct", "ring", "tree", "halving_doubling", "chain")

    def reductions(x, y):
        means = [jaxring.allreduce(x, "x", "mean", algorithm=a) for a in algorithms]
        sums = [jaxring.allreduce(y, "x", algorithm=a) for a in algorithms]
        return means, sums

    f = jax.jit(jax.shard_map(reductions, mesh=mesh, in_specs=P("x"), out_specs=P()))
    # In bfloat16 adding 1.0078125 to 256 changes nothing: the sum would stop there.
    rows = jax.sharding.NamedSharding(mesh, P("x"))
    x = jax.device_put(np.full((n, 3), 300, np.float16), rows)
    y = jax.device_put(np.full((n, 3), 1.0078125, jnp.bfloat16), rows)
    means, sums = f(x, y)
    for mean, total in zip(means, sums, strict=True):
        assert mean.dtype == jnp.float16
        np.testing.assert_array_equal(mean, np.full((1, 3), 300, np.float16))
        expected = np.float32(jnp.bfloat16(n * 1.0078125))
        np.testing.assert_array_equal(total.astype(np.float32), np.full((1, 3), expected))
    return n


@pytest.mark.timeout(300)
def test_half_precision_over_256_ranks():
    """horovod #1699, gloo #454: means of float16 overflowed, sums of bfloat16 stalled."""
    assert spawn(half_precision_on_256_ranks, 1, devices=256) == [256]

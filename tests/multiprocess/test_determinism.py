"""`deterministic=True`: the same bits whatever the algorithm, the buckets, the chunks, the repeat,
and however the same ranks are laid out over devices and processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring.testing import spawn

WORLD_SIZE = 4
SHAPES = ((3,), (40_000,), (257, 33), ())


def operand(rank, dtype):
    """A tree of values whose sum depends on the order in which they are added."""
    random = np.random.default_rng(rank)
    return [
        jnp.asarray(
            random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape), dtype=dtype
        )
        for shape in SHAPES
    ]


def variants(dtype):
    """All algorithms with all sizes of buckets and chunks; for bfloat16 each of them once."""
    sizes = ((32 << 20, 0), (1000, 0), (32 << 20, 5000))
    for i, algorithm in enumerate(("auto", "direct", "chain")):
        for bucket_bytes, chunk_bytes in sizes if dtype == "float32" else sizes[i : i + 1]:
            yield algorithm, {"bucket_bytes": bucket_bytes, "chunk_bytes": chunk_bytes}


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def distinct_results(reduce, dtype):
    """The set of results of all variants, twice each; `reduce(algorithm)` is traced anew."""
    results = set()
    with jaxring.config.override(deterministic=True):
        for algorithm, settings in variants(dtype):
            with jaxring.config.override(**settings):
                step = reduce(algorithm)
                results |= {step(), step()}
    return results


def on_mesh(dtype):
    """Ranks are the devices of a mesh, of this process or of several."""
    mesh = jax.make_mesh((WORLD_SIZE,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    rows = [operand(rank, dtype) for rank in range(WORLD_SIZE)]
    stacked = [np.stack(leaves) for leaves in zip(*rows, strict=True)]
    stacked = [
        jax.make_array_from_callback(leaf.shape, sharding, lambda i, leaf=leaf: leaf[i])
        for leaf in stacked
    ]

    def reduce(algorithm):
        f = jax.jit(
            jax.shard_map(
                lambda tree: jaxring.allreduce(
                    jax.tree.map(lambda leaf: leaf[0], tree), "x", "mean", algorithm=algorithm
                ),
                mesh=mesh,
                in_specs=P("x"),
                out_specs=P(),
            )
        )
        return lambda: bits([leaf.addressable_data(0) for leaf in f(stacked)])

    return distinct_results(reduce, dtype)


def in_mixed_layout(comm):
    """Two processes of two devices."""
    del comm
    return {dtype: on_mesh(dtype) for dtype in ("float32", "bfloat16")}


def in_processes(comm):
    results = {}
    for dtype in ("float32", "bfloat16"):
        tree = operand(comm.rank, dtype)

        def reduce(algorithm, tree=tree):
            f = jax.jit(lambda t: jaxring.allreduce(t, comm, "mean", algorithm=algorithm))
            return lambda: bits(f(tree))

        results[dtype] = distinct_results(reduce, dtype)
    return results


@pytest.fixture(scope="module")
def of_processes():
    return spawn(in_processes, WORLD_SIZE) + spawn(in_mixed_layout, 2, devices=2, distributed=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_for_every_variant_and_layout(dtype, of_processes):
    devices = on_mesh(dtype)
    assert len(devices) == 1
    for results in of_processes:
        assert results[dtype] == devices


def test_the_values_tell():
    rows = [operand(rank, "float32")[1] for rank in range(WORLD_SIZE)]
    forward = ((rows[0] + rows[1]) + rows[2]) + rows[3]
    backward = ((rows[3] + rows[2]) + rows[1]) + rows[0]
    assert bits(forward) != bits(backward)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_algorithms_of_another_order_are_refused(algorithm):
    reduce = jax.vmap(lambda x: jaxring.allreduce(x, "v", algorithm=algorithm), axis_name="v")
    with (
        jaxring.config.override(deterministic=True),
        pytest.raises(jaxring.UsageError, match="use auto, direct, chain or reducer"),
    ):
        reduce(jnp.ones(3))

"""install() on meshes that span processes: a training step in lax's words, carried by jaxring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring.testing import spawn

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 5)).astype(np.float32), "b": np.zeros(5, np.float32)}
BATCH = RNG.normal(size=(8, 6)).astype(np.float32)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def step(params, batch, check_vma):
    """What a user of lax writes; under check_vma=True the sum of the gradients is AD's own."""
    value, grads = jax.value_and_grad(lambda p: lax.pmean(loss(p, batch), "dp"))(params)
    if not check_vma:
        grads = lax.pmean(grads, "dp")
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    rows = lax.all_gather(lax.psum_scatter(batch[:4], "dp", tiled=True), "dp", tiled=True)
    return value, new, rows


def train(comm, check_vma):
    del comm
    jaxring.install()
    jaxring.stats(reset=True)
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        lambda params, batch: step(params, batch, check_vma),
        mesh=mesh,
        in_specs=(P(), P("dp")),
        out_specs=(P(), P(), P("dp")),
        check_vma=check_vma,
    )
    f = jax.jit(f)
    batch = np.concatenate([BATCH, 2 * BATCH]) if n == 4 else BATCH
    sharding = jax.NamedSharding(mesh, P("dp"))
    x = jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    values = []
    for _ in range(4):
        value, params, rows = f(params, x)
        values.append(float(value))
    summed = batch.reshape(n, -1, 6)[:, :4].sum(0)
    for shard in rows.addressable_shards:
        np.testing.assert_allclose(shard.data, summed, rtol=1e-5)
    carried = {row["collective"] for row in jaxring.stats()}
    return values, jax.tree.map(lambda p: np.asarray(p.addressable_data(0)), params), carried


def train_on_one_device(batch):
    params, values = PARAMS, []
    for _ in range(4):
        value, grads = jax.value_and_grad(loss)(params, batch)
        values.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return values, params


def train_both_ways(comm):
    return [train(comm, check_vma) for check_vma in (True, False)]


@pytest.fixture(scope="module")
def trained():
    return spawn(train_both_ways, 2, devices=2, distributed=True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_training_across_processes(check_vma, trained):
    values, params = train_on_one_device(np.concatenate([BATCH, 2 * BATCH]))
    for both in trained:
        got_values, got_params, carried = both[not check_vma]
        np.testing.assert_allclose(got_values, values, rtol=1e-5)
        for name, p in params.items():
            np.testing.assert_allclose(got_params[name], p, rtol=1e-5, atol=1e-6)
        assert carried == {"allreduce", "reduce_scatter", "all_gather"}

"""reduce_gradients_of against gradients on one device, in each place where a gradient can be
taken."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

RANKS = 4
RNG = np.random.default_rng(0)
PARAMS = {
    "w1": RNG.normal(size=(3, 5)).astype(np.float32),
    "b1": RNG.normal(size=5).astype(np.float32),
    "w2": RNG.normal(size=(5, 1)).astype(np.float32),
    "steps": np.int32(3),
}
BATCH = RNG.normal(size=(8, 3)).astype(np.float32)


def forward(params, batch):
    hidden = jnp.tanh(batch @ params["w1"] + params["b1"])
    return (hidden @ params["w2"])[:, 0] ** 2


def mean_loss(params, batch):
    return jnp.mean(forward(params, batch))


def sum_loss(params, batch):
    return jnp.sum(forward(params, batch))


LOSSES = {"mean": mean_loss, "sum": sum_loss}


def gradient_of(loss):
    return jax.grad(loss, allow_int=True)


def drop_int(grads):
    return {k: v for k, v in grads.items() if k != "steps"}


def close(got, expected):
    assert got.keys() == expected.keys()
    for k in got:
        np.testing.assert_allclose(got[k], expected[k], rtol=2e-5, atol=1e-6, err_msg=k)


def shard(spmd, f, out_specs):
    return jax.jit(
        jax.shard_map(
            f,
            mesh=spmd.mesh,
            in_specs=(P(), P("x")),
            out_specs=out_specs,
            check_vma=spmd.check_vma,
        )
    )


def marked(loss, op, **kw):
    return lambda params, batch: loss(jaxring.reduce_gradients_of(params, "x", op, **kw), batch)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradient_inside(spmd, op, carried):
    loss = LOSSES[op]
    f = shard(
        spmd, lambda p, b: drop_int(gradient_of(marked(loss, op, algorithm="ring"))(p, b)), P()
    )
    close(f(PARAMS, BATCH), drop_int(gradient_of(loss)(PARAMS, BATCH)))
    assert carried() == {"ring": RANKS}  # one operation for all leaves, on each of the devices


@pytest.mark.parametrize("loss", ["mean of local means", "sum of local sums", "sum of local means"])
def test_gradient_outside(make_spmd, loss):
    """Under check_vma=True; cotangents hold the 1/RANKS of an outer mean already, hence op
    "sum"."""
    spmd = make_spmd({"x": RANKS}, check_vma=True)
    outer, local, op, scale = {
        "mean of local means": (lax.pmean, mean_loss, "sum", 1),
        "sum of local sums": (lax.psum, sum_loss, "sum", 1),
        "sum of local means": (lax.psum, mean_loss, "mean", 1),
    }[loss]
    f = shard(spmd, lambda p, b: outer(marked(local, op)(p, b), "x"), P())
    reference = sum_loss if local is sum_loss else mean_loss
    expected = drop_int(gradient_of(reference)(PARAMS, BATCH))
    close(drop_int(gradient_of(f)(PARAMS, BATCH)), {k: scale * v for k, v in expected.items()})


def test_value_and_loss_reduced_by_us(spmd):
    """The whole of a data-parallel step: local loss, its gradient, then the mean of the loss."""

    def step(params, batch):
        params = drop_int(params)
        loss, grads = jax.value_and_grad(marked(mean_loss, "mean"))(params, batch)
        return jaxring.allreduce(loss, "x", "mean"), grads

    loss, grads = shard(spmd, step, P())(PARAMS, BATCH)
    np.testing.assert_allclose(loss, mean_loss(PARAMS, BATCH), rtol=1e-5)
    close(grads, jax.grad(mean_loss)(drop_int(PARAMS), BATCH))


def test_buckets_in_reverse_order(spmd):
    def f(params, batch):
        return jax.grad(marked(mean_loss, "mean"))(drop_int(params), batch)

    with jaxring.config.override(bucket_bytes=40):  # b1 and w2 fill 20 bytes each, w1 60
        lowered = shard(spmd, f, P()).lower(PARAMS, BATCH)
        got = shard(spmd, f, P())(PARAMS, BATCH)
    calls = re.findall(r"@jaxring_collective.*?call = (\d).*? : \((.*)\) -> ", lowered.as_text())
    by_index = [shapes for _, shapes in sorted(calls)]
    # The leaves are b1, w1, w2; the last one's bucket is reduced first.
    assert ["5x1x" in s or "3x5x" in s or "<5x" in s for s in by_index] == [True] * 3
    assert "tensor<5x1xf32>" in by_index[0]
    assert "tensor<3x5xf32>" in by_index[1]
    assert "tensor<5xf32>" in by_index[2]
    close(got, jax.grad(mean_loss)(drop_int(PARAMS), BATCH))


def test_dtypes_apart_and_unused_parameters(spmd):
    params = {"half": np.full(3, 0.5, jnp.bfloat16), "full": np.ones(3, np.float32), "unused": 1.0}

    def loss(params, batch):
        return jnp.mean(batch * params["full"] + batch * params["half"].astype(np.float32))

    f = shard(spmd, lambda p, b: jax.grad(marked(loss, "mean"))(p, b), P())
    got = f(params, BATCH)
    expected = jax.grad(loss)(params, BATCH)
    for k in params:
        assert got[k].dtype == jnp.result_type(params[k])
        np.testing.assert_allclose(
            np.float32(got[k]), np.float32(expected[k]), rtol=2e-2 if k == "half" else 1e-5
        )


def test_scan_remat_and_second_order(spmd):
    def loss(params, batch):
        params = jaxring.reduce_gradients_of(params, "x", "sum")

        @jax.checkpoint
        def layer(carry, _):
            return jnp.tanh(carry @ params["w"]), None

        return jnp.sum(lax.scan(layer, batch, None, length=3)[0] ** 2)

    def plain(params, batch):
        return sum(loss_without(params, batch[i : i + 2]) for i in range(0, 8, 2))

    def loss_without(params, batch):
        for _ in range(3):
            batch = jnp.tanh(batch @ params["w"])
        return jnp.sum(batch**2)

    params = {"w": PARAMS["w1"][:, :3]}
    close(shard(spmd, jax.grad(loss), P())(params, BATCH), jax.grad(plain)(params, BATCH))

    def curvature(loss):
        return jax.grad(lambda p, b: jnp.sum(jnp.sin(jax.grad(loss)(p, b)["w"])))

    f = shard(spmd, curvature(loss), P())
    if spmd.check_vma:
        close(f(params, BATCH), curvature(plain)(params, BATCH))
    else:
        f(params, BATCH)  # each rank differentiates its own copy; only that it works


def test_forward_mode_is_the_identity(spmd):
    def f(params, batch):
        params = drop_int(params)
        y, t = jax.jvp(lambda p: jaxring.reduce_gradients_of(p, "x"), (params,), (params,))
        return jax.tree.map(lambda v: jaxring.allreduce(v, "x", "mean"), (y, t))

    for got in shard(spmd, f, P())(PARAMS, BATCH):
        close(got, drop_int(PARAMS))


def test_parameters_of_each_rank(spmd):
    """Parameters that differ between ranks keep their type; every rank gets the same gradient."""
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)

    def f(x):
        return jax.grad(lambda x: jnp.sum(jaxring.reduce_gradients_of(x, "x", "sum") ** 2))(x)

    np.testing.assert_allclose(spmd(f, x), np.broadcast_to(2 * x.sum(0), x.shape))


def test_vmap_axis():
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)

    def f(w, x):
        return jax.grad(lambda w: jnp.sum(jaxring.reduce_gradients_of(w, "v", "mean") * x))(w)

    got = jax.vmap(f, in_axes=(None, 0), axis_name="v")(np.ones(3, np.float32), x)
    np.testing.assert_allclose(got, np.broadcast_to(x.mean(0), x.shape))


def test_plain_vmap(spmd):
    def f(params, batch):
        def per_example(row):
            return jax.grad(marked(mean_loss, "mean"))(drop_int(params), row[None])["b1"]

        return jax.vmap(per_example)(batch)

    got = shard(spmd, f, P())(PARAMS, BATCH)
    each = jax.vmap(lambda row: jax.grad(mean_loss)(drop_int(PARAMS), row[None])["b1"])(BATCH)
    np.testing.assert_allclose(got, each.reshape(RANKS, 2, 5).mean(0), rtol=1e-5, atol=1e-6)


def test_sub_axis_of_a_grid(grid):
    x = np.arange(6.0, dtype=np.float32)[:, None] + 1

    def f(x):
        w = jnp.float32(2)
        gradient = jax.grad(lambda w: jnp.sum(jaxring.reduce_gradients_of(w, "y", "sum") * x))
        return gradient(w)

    got = grid(f, x)
    if grid.check_vma:  # w is equal on all devices, so AD itself sums over "x"
        np.testing.assert_allclose(got, np.full(6, x.sum()))
    else:
        np.testing.assert_allclose(got, np.repeat(x.reshape(2, 3).sum(1), 3))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"op": "max"}, "op 'max' is not linear; use mean or sum"),
        ({"axis_name": "y"}, "reduce_gradients_of: axis name 'y' is not bound"),
        ({"algorithm": "rnig"}, "unknown algorithm 'rnig'"),
    ],
)
def test_errors(spmd, kwargs, text):
    arguments = {"axis_name": "x", **kwargs}
    with pytest.raises(jaxring.UsageError, match=text):
        spmd(lambda x: jaxring.reduce_gradients_of(x, **arguments), np.ones((4, 2)))

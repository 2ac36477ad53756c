"""allreduce under vmap: plain batching, a bound axis, and one together with mesh axes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring

X = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
NUMPY_OPS = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("op", NUMPY_OPS)
@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (1, 1)], ids=str)
def test_vmap(spmd, op, dims):
    f = jax.vmap(lambda x: jaxring.allreduce(x, "x", op), in_axes=dims[0], out_axes=dims[1])
    expected = np.broadcast_to(NUMPY_OPS[op](X, axis=0), X.shape)
    if dims == (1, 0):
        expected = expected.swapaxes(1, 2)
    close(spmd(f, X), expected)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *itertools.product(NUMPY_OPS, ["float32", "bfloat16", "int8"]),
        *itertools.product(["and", "or"], ["bool"]),
    ],
)
def test_vmap_axis_alone(op, dtype):
    x = np.array([[1, 0, 2], [3, 1, 0]], jnp.dtype(dtype))
    got = jax.vmap(lambda x: jaxring.allreduce(x, "v", op), axis_name="v")(x)
    result = "float32" if (op, dtype) == ("mean", "int8") else dtype
    reference = {"and": np.all, "or": np.any, **NUMPY_OPS}[op](x.astype(result), axis=0)
    assert got.dtype == jnp.dtype(result)
    np.testing.assert_array_equal(got, np.broadcast_to(reference.astype(result), x.shape))


@pytest.mark.parametrize("op", NUMPY_OPS)
@pytest.mark.parametrize("axes", [("v", "x"), ("x", "v")], ids=str)
def test_vmap_axis_with_mesh_axis(spmd, op, axes):
    f = jax.vmap(lambda x: jaxring.allreduce(x, axes, op), axis_name="v")
    close(spmd(f, X), np.broadcast_to(NUMPY_OPS[op](X, axis=(0, 1)), X.shape))


def test_vmap_axis_inside_shard_map(spmd):
    f = jax.vmap(lambda x: jaxring.allreduce(x, "v"), axis_name="v")
    close(spmd(f, X), np.broadcast_to(X.sum(1, keepdims=True), X.shape))


def test_low_precision_rounds_once_over_vmap_and_mesh(spmd):
    x = np.full((4, 64), 1.01, jnp.bfloat16)
    f = jax.vmap(lambda x: jaxring.allreduce(x, ("v", "x")), axis_name="v")
    exact = x.astype(np.float32).sum().astype(jnp.bfloat16)
    np.testing.assert_array_equal(spmd(f, x), np.full((4, 64), exact))


@pytest.mark.parametrize(("op", "expected"), [("sum", 6), ("mean", 2), ("prod", 8), ("max", 2)])
def test_vmap_axis_of_an_unbatched_operand(op, expected):
    def f(x, y):
        return jaxring.allreduce((x, y), "v", op)

    got = jax.vmap(f, in_axes=(0, None), out_axes=(None, None), axis_name="v")(
        np.ones(3, np.float32), jnp.float32(2)
    )
    close(got[1], expected)


def test_vmap_groups():
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    groups = [[3, 0], [1], [2]]
    f = jax.vmap(lambda x: jaxring.allreduce(x, "v", axis_index_groups=groups), axis_name="v")
    close(f(x), np.stack([x[0] + x[3], x[1], x[2], x[0] + x[3]]))


def test_vmap_of_jit_with_a_bound_axis():
    f = jax.vmap(jax.jit(lambda x: jaxring.allreduce(x, "v")), axis_name="v")
    close(f(X), np.broadcast_to(X.sum(0), X.shape))

"""reduce against numpy: the root has the reduction, the others zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring

NUMPY_OPS = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
JNP_OPS = {"sum": jnp.sum, "mean": jnp.mean, "prod": jnp.prod, "min": jnp.min, "max": jnp.max}
X = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)


def at(root, y, ranks=4):
    full = np.zeros((ranks, *np.shape(y)), np.asarray(y).dtype)
    full[root] = y
    return full


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("op", NUMPY_OPS)
@pytest.mark.parametrize("root", [0, 2])
def test_ops(spmd, op, root):
    got = spmd(lambda x: jaxring.reduce(x, "x", op, root=root), X)
    close(got, at(root, NUMPY_OPS[op](X, axis=0)))


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
def test_axes(grid, axes):
    x = np.arange(6.0, dtype=np.float32)
    got = grid(lambda x: jaxring.reduce(x, axes, root=1), x)
    np.testing.assert_array_equal(got, at(1 if axes[0] == "x" else 3, np.float32(15), 6))


@pytest.mark.parametrize(
    ("op", "dtype", "result"),
    [("sum", "bool", "int32"), ("mean", "int8", "float32"), ("and", "bool", "bool")],
)
def test_dtypes(spmd, op, dtype, result):
    x = (X > 0).astype(dtype)
    got = spmd(lambda x: jaxring.reduce(x, "x", op, root=1), x)
    assert got.dtype == result
    expected = {"sum": np.sum, "mean": np.mean, "and": np.all}[op](x, axis=0).astype(result)
    close(got, at(1, expected))


@pytest.mark.parametrize("size", [0, 1, 70_001])
@pytest.mark.parametrize("algorithm", ["auto", "tree"])
def test_sizes(make_spmd, size, algorithm):
    x = np.random.default_rng(0).normal(size=(5, size)).astype(np.float32)
    with jaxring.config.override(algorithm=algorithm):
        got = make_spmd({"x": 5})(lambda x: jaxring.reduce(x, "x", root=3), x)
    np.testing.assert_allclose(got, at(3, x.sum(0), 5), rtol=1e-4, atol=1e-5)


def test_varies(make_spmd):
    def f(x):
        y = jaxring.reduce(jaxring.allreduce(x, "x"), "x", "max")
        assert set(jax.typeof(y).manual_axis_type.varying) == {"x"}
        return y

    close(make_spmd({"x": 4}, True)(f, X), at(0, X.sum(0)))


@pytest.mark.parametrize("op", NUMPY_OPS)
def test_derivatives(spmd, op):
    x = np.array([[3, 1, 0, 5], [3, 5, 0, 5], [0, 5, 2, 1], [3, 4, 2, 5]], np.float32)
    t = np.arange(16.0, dtype=np.float32).reshape(4, 4)

    def f(x):
        return jaxring.reduce(x, "x", op, root=2)

    def reference(x):
        return JNP_OPS[op](x, axis=0)

    y, dy = spmd(lambda x, t: jax.jvp(f, (x,), (t,)), x, t)
    expected = jax.jvp(reference, (x,), (t,))
    close(y, at(2, np.asarray(expected[0])))
    close(dy, at(2, np.asarray(expected[1])))
    gradient = spmd(jax.grad(lambda x: jnp.sum(f(x) ** 2)), x)
    close(gradient, jax.grad(lambda x: jnp.sum(reference(x) ** 2))(x))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_transpose_is_a_broadcast_from_the_root(spmd, op):
    def transposed(x, ct):
        return jax.linear_transpose(lambda x: jaxring.reduce(x, "x", op, root=1), x)(ct)[0]

    got = spmd(transposed, X, X)
    close(got, np.broadcast_to(X[1] / (4 if op == "mean" else 1), X.shape))


def test_transpose_of_another_op(spmd):
    def f(x):
        return jax.linear_transpose(lambda x: jaxring.reduce(x, "x", "max"), x)(x)

    with pytest.raises(jaxring.UsageError, match=r"^jaxring.reduce: op 'max' is not linear"):
        spmd(f, X)


def test_errors(spmd):
    with pytest.raises(jaxring.UsageError, match=r"^jaxring.reduce: root 7 is out of range for 4"):
        spmd(lambda x: jaxring.reduce(x, "x", root=7), X)
    with pytest.raises(jaxring.UsageError, match="op 'and' has no meaning for float32"):
        spmd(lambda x: jaxring.reduce(x, "x", "and"), X)

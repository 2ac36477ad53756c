"""reduce_scatter against numpy: ops, dtypes, dimensions, groups, derivatives."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring

NUMPY_OPS = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
X = np.random.default_rng(0).normal(size=(4, 4, 8, 3)).astype(np.float32)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("op", NUMPY_OPS)
def test_ops(spmd, op):
    close(spmd(lambda x: jaxring.reduce_scatter(x, "x", op), X), NUMPY_OPS[op](X, axis=0))


@pytest.mark.parametrize("dimension", [0, 1, -2])
def test_tiled(spmd, dimension):
    got = spmd(lambda x: jaxring.reduce_scatter(x, "x", scatter_dimension=dimension, tiled=True), X)
    close(got, np.stack(np.split(X.sum(0), 4, dimension)))


@pytest.mark.parametrize(
    ("op", "dtype", "result"),
    [
        ("sum", "bool", "int32"),
        ("mean", "int8", "float32"),
        ("min", "bool", "bool"),
        ("or", "bool", "bool"),
        ("sum", "int8", "int8"),
        ("mean", "bfloat16", "bfloat16"),
        ("prod", "complex64", "complex64"),
    ],
)
def test_dtypes(spmd, op, dtype, result):
    x = (X > 0.3).astype(jnp.dtype(dtype)) if dtype != "complex64" else (X + 1j).astype(dtype)
    got = spmd(lambda x: jaxring.reduce_scatter(x, "x", op), x)
    assert got.dtype == jnp.dtype(result)
    wide = x.astype(result if result in ("bool", "complex64") else np.float64)
    expected = {"or": np.any, **NUMPY_OPS}[op](wide, axis=0)
    kind = np.complex64 if dtype == "complex64" else np.float32
    close(got.astype(kind), expected.astype(kind))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_small_floats_round_once(spmd, dtype):
    x = np.random.default_rng(1).normal(size=(4, 4, 33)).astype(jnp.dtype(dtype))
    got = spmd(lambda x: jaxring.reduce_scatter(x, "x"), x)
    expected = x.astype(np.float32).sum(0).astype(x.dtype)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_anywhere_gives_nan(spmd, op):
    x = X.copy()
    x[2, 1, 0, 0] = np.nan
    got = spmd(lambda x: jaxring.reduce_scatter(x, "x", op), x)
    assert np.isnan(got[1, 0, 0])
    assert np.isnan(got).sum() == 1


@pytest.mark.parametrize(
    "groups", [[[0, 2], [3, 1]], [[3, 2, 1, 0]], [[0], [1], [2], [3]]], ids=str
)
def test_groups(spmd, groups):
    p = len(groups[0])

    def f(x):
        return jaxring.reduce_scatter(x[:p], "x", "mean", axis_index_groups=groups)

    got = spmd(f, X)
    for group in groups:
        close(got[group], X[group].mean(0)[:p])


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
def test_order_of_the_axes(grid, axes):
    x = np.arange(6 * 6.0, dtype=np.float32).reshape(6, 6)
    got = grid(lambda x: jaxring.reduce_scatter(x, axes), x)
    parts = x.sum(0).reshape(2, 3) if axes[0] == "x" else x.sum(0).reshape(3, 2).T
    close(got, parts.ravel())


@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_derivative_of_other_ops(spmd, op):
    x = np.array([[3, 1, 0, 5], [3, 5, 0, 5], [0, 5, 2, 1], [3, 4, 2, 5]], np.float32)
    t = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    dy = spmd(
        lambda x, t: jax.jvp(lambda x: jaxring.reduce_scatter(x, "x", op), (x,), (t,))[1], x, t
    )
    _, expected = jax.jvp(lambda x: {**NUMPY_OPS, **JNP}[op](x, axis=0), (x,), (t,))
    close(dy, expected)
    gradient = spmd(jax.grad(lambda x: jaxring.reduce_scatter(x, "x", op) ** 2), x)
    close(gradient, jax.grad(lambda x: jnp.sum(JNP[op](x, axis=0) ** 2))(x))


JNP = {"min": jnp.min, "max": jnp.max, "prod": jnp.prod}


def test_transpose_of_mean(spmd):
    f = lambda x: jaxring.reduce_scatter(x, "x", "mean")  # noqa: E731
    ct = X[:, 0]
    got = spmd(lambda x, ct: jax.linear_transpose(f, x)(ct)[0], X, ct)
    close(got, np.broadcast_to(ct / 4, X.shape))


@pytest.mark.parametrize("shape", [(4,), (4, 0), (4, 3, 0)], ids=str)
def test_odd_shapes(spmd, shape):
    x = np.ones((4, *shape), np.float32)
    got = spmd(lambda x: jaxring.reduce_scatter(x, "x"), x)
    np.testing.assert_array_equal(got, 4 * x[:, 0])


@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring"])
@pytest.mark.parametrize("size", [5, 70_000])
def test_algorithms(make_spmd, carried, algorithm, size):
    x = np.random.default_rng(0).normal(size=(4, 4, size)).astype(np.float32)
    got = make_spmd({"x": 4})(lambda x: jaxring.reduce_scatter(x, "x", algorithm=algorithm), x)
    close(got, x.sum(0))
    assert algorithm == "auto" or set(carried()) == {algorithm}


def test_deterministic(make_spmd, carried):
    x = np.random.default_rng(0).normal(size=(4, 4, 70_001)).astype(np.float32)
    with jaxring.config.override(deterministic=True):
        got = make_spmd({"x": 4})(lambda x: jaxring.reduce_scatter(x, "x"), x)
    in_order = np.zeros_like(x[0])
    for row in x:
        in_order += row
    np.testing.assert_array_equal(got, in_order)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x: jaxring.reduce_scatter(x[:, :6], "x", scatter_dimension=1, tiled=True),
            (
                r"dimension 1 has size 6, not divisible by the number of ranks 4; pad x to 8 or"
                " pass another scatter_dimension"
            ),
        ),
        (
            lambda x: jaxring.reduce_scatter(x, "x", scatter_dimension=1),
            (
                "dimension 1 has size 8, but tiled=False needs one element for each of 4 ranks;"
                " pass tiled=True"
            ),
        ),
        (
            lambda x: jaxring.reduce_scatter(x, "x", scatter_dimension=3),
            r"scatter_dimension=3 names no dimension of 3; pass one of 0\.\.2",
        ),
        (
            lambda x: jaxring.reduce_scatter(x[0, 0, 0], "x"),
            "scatter_dimension=0 names no dimension of 0; pass an array with more",
        ),
        (
            lambda x: jaxring.reduce_scatter(x, "x", scatter_dimension=cast(Any, 1.5)),
            r"scatter_dimension must be an integer, got 1\.5",
        ),
        (lambda x: jaxring.reduce_scatter(x, "x", "median"), "unknown op 'median'; use sum"),
        (
            lambda x: jaxring.reduce_scatter(x, "x", algorithm="tree"),
            "algorithm 'tree' does not serve reduce_scatter; use auto, direct, ring or",
        ),
    ],
)
def test_errors(spmd, call, text):
    with pytest.raises(jaxring.UsageError, match=f"^jaxring.reduce_scatter: {text}"):
        spmd(call, X)


def test_uneven_groups(spmd):
    with pytest.raises(
        jaxring.UsageError, match=r"have the sizes \[1, 3\].*make all groups equally"
    ):
        spmd(lambda x: jaxring.reduce_scatter(x, "x", axis_index_groups=[[0], [1, 2, 3]]), X)


def test_groups_that_are_no_integers(spmd):
    groups: Any = [[0.5, 1], 2]
    text = r"axis_index_groups must be lists of integers, got \[\[0.5, 1\], 2\]"
    with pytest.raises(jaxring.UsageError, match=text):
        spmd(lambda x: jaxring.reduce_scatter(x, "x", axis_index_groups=groups), X)

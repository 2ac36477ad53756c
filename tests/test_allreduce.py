"""allreduce on mesh axes: values, dtypes, pytrees, constants, and which devices take part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import Tracer

import jaxring

NUMPY_OPS = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
X = np.arange(24.0, dtype=np.float32).reshape(6, 4) - 5


@pytest.mark.parametrize("op", NUMPY_OPS)
@pytest.mark.parametrize("axes", ["x", "y", ("x", "y"), ("y", "x"), ["x", "y"]], ids=str)
def test_value_over_axes(grid, op, axes):
    got = grid(lambda x: jaxring.allreduce(x, axes, op), X)
    cube = X.reshape(2, 3, 4)
    over = {"x": (0,), "y": (1,)}.get(str(axes), (0, 1))
    expected = np.broadcast_to(NUMPY_OPS[op](cube, over, keepdims=True), cube.shape)
    np.testing.assert_allclose(got, expected.reshape(6, 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "dtype", "result"),
    [
        ("sum", "bool", "int32"),
        ("prod", "bool", "int32"),
        ("mean", "bool", "float32"),
        ("mean", "int8", "float32"),
        ("mean", "int32", "float32"),
        ("mean", "uint16", "float32"),
        ("min", "bool", "bool"),
        ("max", "bool", "bool"),
        ("and", "bool", "bool"),
        ("or", "bool", "bool"),
        ("sum", "int8", "int8"),
        ("sum", "bfloat16", "bfloat16"),
        ("mean", "float16", "float16"),
        ("sum", "complex64", "complex64"),
    ],
)
def test_dtype_of_result(spmd, op, dtype, result):
    x = np.array([[0, 1, 1], [1, 1, 0], [0, 1, 1], [0, 1, 0]], dtype=jnp.dtype(dtype))
    got = spmd(lambda x: jaxring.allreduce(x, "x", op), x)
    assert got.dtype == jnp.dtype(result)
    reference = {"and": np.all, "or": np.any, **NUMPY_OPS}[op](x.astype(result), axis=0)
    np.testing.assert_array_equal(got, np.broadcast_to(reference.astype(result), (4, 3)))


def test_int8_wraps(spmd):
    got = spmd(lambda x: jaxring.allreduce(x, "x"), np.full((4, 2), 100, np.int8))
    np.testing.assert_array_equal(got, np.full((4, 2), -112, np.int8))


def test_64_bit_types(check_vma, make_spmd):
    with jax.enable_x64(True):
        spmd = make_spmd({"x": 4}, check_vma)
        big = np.array([2**40, 2**41, 3, 4], np.int64)[:, None]
        np.testing.assert_array_equal(
            spmd(lambda x: jaxring.allreduce(x, "x"), big), np.full((4, 1), big.sum())
        )
        got = spmd(lambda x: jaxring.allreduce(x, "x", "mean"), np.pi * np.arange(4.0)[:, None])
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, np.full((4, 1), 1.5 * np.pi), rtol=1e-15)
        for dtype in ("int8", "int32", "int64"):
            x = np.arange(4, dtype=dtype)[:, None]
            ours, theirs = spmd(lambda x: (jaxring.allreduce(x, "x", "mean"), lax.pmean(x, "x")), x)
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_anywhere_gives_nan_everywhere(spmd, op, dtype):
    x = np.array([[1, 2], [3, 4], [np.nan, 6], [7, 8]], jnp.dtype(dtype))
    got = spmd(lambda x: jaxring.allreduce(x, "x", op), x).astype(np.float32)
    assert np.isnan(got[:, 0]).all()
    np.testing.assert_array_equal(got[:, 1], np.full(4, 2 if op == "min" else 8))


def test_eager_equals_jit(spmd):
    f = spmd.map(lambda x: jaxring.allreduce(x, "x", "mean"))
    x = X[:4]
    np.testing.assert_array_equal(f(x), jax.jit(f)(x))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_odd_shapes(spmd, shape):
    x = np.ones((4, *shape), np.float32)
    got = spmd(lambda x: jaxring.allreduce(x, "x"), x)
    np.testing.assert_array_equal(got, 4 * x)


def test_permuted_devices_and_subsets(check_vma, make_spmd):
    spmd = make_spmd({"x": 2, "y": 2}, check_vma, [jax.devices()[i] for i in (6, 1, 4, 3)])
    got = spmd(lambda x: jaxring.allreduce(x, "y"), X[:4])
    np.testing.assert_array_equal(got, np.repeat(X[:4].reshape(2, 2, 4).sum(1), 2, axis=0))


def test_pmap():
    got = jax.pmap(lambda x: jaxring.allreduce(x, "i", "max"), axis_name="i")(X)
    np.testing.assert_array_equal(got, np.broadcast_to(X.max(0), X.shape))


GROUPS = [[[0, 2], [1, 3]], [[0], [3, 1, 2]], [[3, 2, 1, 0]]]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_groups(make_spmd, groups, op):
    spmd = make_spmd({"x": 4}, check_vma=False)
    x = X[:4]
    got = spmd(lambda x: jaxring.allreduce(x, "x", op, axis_index_groups=groups), x)
    for group in groups:
        expected = NUMPY_OPS[op](x[group], axis=0)
        np.testing.assert_allclose(got[group], np.broadcast_to(expected, (len(group), 4)))


def test_groups_of_two_axes(make_spmd):
    spmd = make_spmd({"x": 2, "y": 3}, check_vma=False)
    groups = [[0, 1], [2, 3, 4, 5]]
    got = spmd(lambda x: jaxring.allreduce(x, ("y", "x"), axis_index_groups=groups), X)
    order = np.arange(6).reshape(2, 3).T.ravel()  # rank over ("y", "x") -> row
    for group in groups:
        np.testing.assert_allclose(
            got[order[group]], np.broadcast_to(X[order[group]].sum(0), (len(group), 4))
        )


# -- Pytrees ---------------------------------------------------------------------------------------


def test_pytree_is_one_call_for_each_dtype(spmd):
    def f(x):
        tree = {"a": x, "b": [x[:2], (x * 3).astype(jnp.int32)], "c": None, "d": x.sum()}
        return jaxring.allreduce(tree, "x")

    got = spmd(f, X[:4])
    total = X[:4].sum(0)
    for key, expected in [("a", total), ("d", total.sum())]:
        np.testing.assert_allclose(got[key], np.broadcast_to(expected, (4, *np.shape(expected))))
    np.testing.assert_allclose(got["b"][0], np.broadcast_to(total[:2], (4, 2)))
    np.testing.assert_array_equal(got["b"][1], np.broadcast_to(3 * total, (4, 4)).astype(np.int32))
    assert got["c"] is None
    text = jax.jit(spmd.map(f)).lower(X[:4]).as_text()
    assert text.count("custom_call @jaxring_collective") == 2


def test_buckets_split_a_large_pytree(spmd):
    f = spmd.map(lambda x: jaxring.allreduce([x, x + 1, x + 2], "x"))
    with jaxring.config.override(bucket_bytes=32):  # a leaf has 16 bytes
        text = jax.jit(f).lower(X[:4]).as_text()
    assert text.count("custom_call @jaxring_collective") == 2


def test_leaves_that_vary_differently(grid):
    def f(x):
        per_x = jaxring.allreduce(x, "y")  # varies over x only
        return jaxring.allreduce([x, per_x], "x")

    got = grid(f, X)
    cube = X.reshape(2, 3, 4)
    np.testing.assert_allclose(got[0], np.tile(cube.sum(0), (2, 1)))
    np.testing.assert_allclose(got[1], np.broadcast_to(X.sum(0), (6, 4)))


# -- Constants -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "value", [1, 2.5, True, 3 + 1j, np.float16(2), np.arange(3), np.array([True, False])], ids=repr
)
def test_constants_fold_as_in_lax(spmd, op, value):
    def f(x):
        ours = jaxring.allreduce(value, "x", op)
        theirs = {"sum": lax.psum, "mean": lax.pmean}[op](value, "x")
        assert not isinstance(ours, Tracer) or isinstance(theirs, Tracer)
        assert type(ours) is type(theirs)
        assert jax.typeof(ours) == jax.typeof(theirs)
        return jnp.asarray(ours), jnp.asarray(theirs)

    got, expected = spmd(f, X[:4])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("op", "value", "expected"),
    [("prod", 3, 81), ("prod", True, 1), ("min", 2.5, 2.5), ("max", 7, 7), ("and", True, True)],
)
def test_constants_of_other_ops(spmd, op, value, expected):
    got = spmd(lambda x: jaxring.allreduce(value, "x", op), X[:4])
    np.testing.assert_array_equal(got, np.full(4, expected))


def test_constants_beside_traced_leaves(spmd):
    def f(x):
        return jaxring.allreduce([x, 2, np.float32(1.5)], "x")

    got = spmd(f, X[:4])
    np.testing.assert_allclose(got[1], np.full(4, 8))
    np.testing.assert_allclose(got[2], np.full(4, 6.0))


def test_constant_in_uneven_groups(make_spmd):
    spmd = make_spmd({"x": 4}, check_vma=False)
    groups = [[0], [1, 2, 3]]
    got = spmd(lambda x: jaxring.allreduce(1, "x", axis_index_groups=groups), X[:4])
    np.testing.assert_array_equal(got, [1, 3, 3, 3])


def test_empty_pytree_and_no_axes(spmd):
    got = spmd(lambda x: (x, jaxring.allreduce([], "x"), jaxring.allreduce(x, ())), X[:4])
    assert got[1] == []
    np.testing.assert_array_equal(got[2], X[:4])

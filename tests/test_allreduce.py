"""allreduce on mesh axes: values, dtypes, pytrees, constants, and which devices take part."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

import jaxring

NUMPY_OPS = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
X = np.arange(24.0, dtype=np.float32).reshape(6, 4) - 5


def calls_of(lowered) -> list[str]:
    return re.findall(r"custom_call @jaxring_collective.*", lowered.as_text())


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
    assert len(calls_of(jax.jit(spmd.map(f)).lower(X[:4]))) == 2


def test_buckets_split_a_large_pytree(spmd):
    f = spmd.map(lambda x: jaxring.allreduce([x, x + 1, x + 2], "x"))
    with jaxring.config.override(bucket_bytes=32):  # a leaf has 16 bytes
        lowered = jax.jit(f).lower(X[:4])
    assert len(calls_of(lowered)) == 2


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


# -- What is emitted -------------------------------------------------------------------------------


def test_axis_of_size_one_emits_nothing(check_vma, make_spmd):
    spmd = make_spmd({"x": 1, "y": 2}, check_vma)

    def f(x):
        flag = x > 0
        return jaxring.allreduce(x, "x"), jaxring.allreduce(flag, "x"), lax.psum(flag, "x")

    x = X[:2]
    assert calls_of(jax.jit(spmd.map(f)).lower(x)) == []
    got = spmd(f, x)
    np.testing.assert_array_equal(got[0], x)
    np.testing.assert_array_equal(got[1], got[2])
    assert got[1].dtype == got[2].dtype


def test_result_does_not_vary(grid):
    if not grid.check_vma:
        return

    def f(x):
        y = jaxring.allreduce(x, "x")
        assert jax.typeof(y).manual_axis_type.varying == {"y"}
        assert jax.typeof(jaxring.allreduce(x, ("x", "y"))).manual_axis_type.varying == frozenset()
        return y

    grid(f, X)


def test_attributes_of_the_call(grid):
    def f(x):
        y = jaxring.allreduce(x, "y", name="first", algorithm="ring")
        return jaxring.allreduce(y * x, "x", "max")

    first, second = calls_of(jax.jit(grid.map(f)).lower(X))
    assert 'name = "first"' in first
    assert 'algorithm = "ring"' in first
    assert 'op = "sum"' in first
    assert "call = 0 : i64" in first
    assert "group_members = dense<[0, 1, 2, 3, 4, 5]>" in first
    assert "group_sizes = dense<3> : tensor<2xi64>" in first
    assert 'op = "max"' in second
    assert "call = 1 : i64" in second
    assert "group_members = dense<[0, 3, 1, 4, 2, 5]>" in second
    assert "has_side_effect = true" in second


def test_modules_are_told_apart(make_spmd):
    spmd = make_spmd({"x": 2})

    def named(x):
        return jaxring.allreduce(x, "x")

    f = jax.jit(spmd.map(named))
    identities = [
        re.findall(r'module = "([^"]*)"', calls_of(f.lower(X[:2, :n]))[0])[0] for n in (1, 2)
    ]
    names, numbers = zip(*(i.split("#") for i in identities), strict=True)
    assert names[0] == names[1]
    assert int(numbers[1]) == int(numbers[0]) + 1


def test_name_reaches_the_profiler(make_spmd):
    spmd = make_spmd({"x": 2})
    f = spmd.map(lambda x: jaxring.allreduce(jaxring.allreduce(x, "x", name="mine") * x, "x"))
    text = jax.jit(f).lower(X[:2]).as_text(debug_info=True)
    assert "mine/jaxring_allreduce" in text
    assert "jaxring.allreduce/jaxring_allreduce" in text


def test_abstract_mesh_lowers(make_spmd):
    mesh = make_spmd({"x": 2}).mesh.abstract_mesh
    f = jax.shard_map(
        lambda x: jaxring.allreduce(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    traced = jax.jit(f).trace(jax.ShapeDtypeStruct((4,), np.float32))
    (call,) = calls_of(traced.lower(lowering_platforms=("cpu",)))
    assert "device_ids = dense<> : tensor<0xi64>" in call


def test_donated_input_is_right(spmd):
    f = jax.jit(spmd.map(lambda x: jaxring.allreduce(x, "x")), donate_argnums=0)
    sharding = jax.NamedSharding(spmd.mesh, P("x"))
    got = f(jax.device_put(X[:4], sharding))
    np.testing.assert_array_equal(got, np.broadcast_to(X[:4].sum(0), (4, 4)))


# -- Meshes with axes that stay automatic ----------------------------------------------------------


def explicit_axis_beside(kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    return mesh, jax.device_put(X[:4], jax.NamedSharding(mesh, P("x", "y")))


def test_explicit_axis_beside_the_manual_one(check_vma):
    mesh, x = explicit_axis_beside(jax.sharding.AxisType.Explicit)

    def f(x):
        return jax.shard_map(
            lambda x: jaxring.allreduce(x, "x"),
            mesh=mesh,
            axis_names={"x"},
            in_specs=P("x"),
            out_specs=P(),
            check_vma=check_vma,
        )(x)

    got = jax.jit(f)(x)
    np.testing.assert_array_equal(got, X[:4].reshape(2, 2, 4).sum(0))
    gradient = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x)
    np.testing.assert_allclose(gradient, 2 * np.tile(X[:4].reshape(2, 2, 4).sum(0), (2, 1)))


def test_explicit_mesh_all_manual(check_vma):
    mesh, x = explicit_axis_beside(jax.sharding.AxisType.Explicit)
    f = jax.shard_map(
        lambda x: jaxring.allreduce(x, "x"),
        mesh=mesh,
        in_specs=P("x", "y"),
        out_specs=P(None, "y"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(f)(x), X[:4].reshape(2, 2, 4).sum(0))


def partial_auto():
    mesh, x = explicit_axis_beside(jax.sharding.AxisType.Auto)
    f = jax.shard_map(
        lambda x: jaxring.allreduce(x, "x", "mean"),
        mesh=mesh,
        axis_names={"x"},
        in_specs=P("x"),
        out_specs=P(),
    )
    return jax.jit(f), x


def test_auto_axis_beside_the_manual_one_raises():
    f, x = partial_auto()
    with pytest.raises(jaxring.UsageError, match=r"Auto mesh axes \('y',\).*make all axes manual"):
        f(x)


def test_auto_axis_falls_back_on_request(carried):
    f, x = partial_auto()
    with jaxring.config.override(fallback="lax"), pytest.warns(UserWarning, match=r"jax\.lax"):
        got = f(x)
    np.testing.assert_allclose(got, X[:4].reshape(2, 2, 4).mean(0))
    assert carried() == {}

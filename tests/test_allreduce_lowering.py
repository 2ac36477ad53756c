"""What allreduce emits, and on which meshes: attributes, names, axes beside the manual ones."""

import concurrent.futures
import re

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

X = np.arange(24.0, dtype=np.float32).reshape(6, 4) - 5


def calls_of(lowered) -> list[str]:
    return re.findall(r"custom_call @jaxring_collective.*", lowered.as_text())


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


def test_mesh_from_the_context(make_spmd):
    mesh = make_spmd({"x": 4}).mesh
    f = jax.shard_map(lambda x: jaxring.allreduce(x, "x"), in_specs=P("x"), out_specs=P())
    with jax.set_mesh(mesh):
        got = jax.jit(f)(X[:4])
    np.testing.assert_array_equal(got, X[:4].sum(0, keepdims=True))


def test_shard_map_inside_shard_map(check_vma):
    mesh, x = explicit_axis_beside(jax.sharding.AxisType.Auto)

    def inner(x):
        return jaxring.allreduce(x, "x"), jaxring.allreduce(x, ("x", "y"))

    def outer(x):
        specs = P(None, "y"), P()
        return jax.shard_map(
            inner, axis_names={"y"}, in_specs=specs[0], out_specs=specs, check_vma=check_vma
        )(x)

    f = jax.shard_map(
        outer, mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=P(), check_vma=check_vma
    )
    over_x, over_both = jax.jit(f)(x)
    np.testing.assert_array_equal(over_x, X[:4].reshape(2, 2, 4).sum(0))
    np.testing.assert_array_equal(over_both, X[:4].reshape(2, 2, 2, 2).sum((0, 2)))


def test_traced_and_run_by_several_threads(make_spmd):
    def work(i):
        f = make_spmd({"x": 4}).map(lambda x: jaxring.allreduce(x * i, "x", name=f"thread {i}"))
        return np.asarray(jax.jit(f)(X[:4]))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for i, got in enumerate(pool.map(work, range(8))):
            np.testing.assert_array_equal(got, np.broadcast_to(i * X[:4].sum(0), (4, 4)))


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


def test_vmap_over_an_explicit_axis_keeps_it():
    """The batch dimension stays sharded; only the primitive's lowering can know that it is."""
    mesh, x = explicit_axis_beside(jax.sharding.AxisType.Explicit)
    x = jax.device_put(x, jax.NamedSharding(mesh, P("y", "x")))
    with jax.set_mesh(mesh):
        f = jax.vmap(
            jax.shard_map(lambda x: jaxring.allreduce(x, "x"), in_specs=P("x"), out_specs=P(None))
        )
        for g in (f, jax.jit(f)):
            y = g(x)
            assert y.sharding.spec == P("y", None)
            np.testing.assert_array_equal(y, X[:4].reshape(4, 2, 2).sum(1))


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

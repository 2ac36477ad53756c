"""What allreduce refuses, and the sentence with which it does; warnings; the trace-time
settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxring

X = np.ones((4, 3), np.float32)


def expect(error, text):
    return pytest.raises(error, match=text)


# -- Axes ------------------------------------------------------------------------------------------


def test_unbound_axis():
    text = r"^jaxring.allreduce: axis name 'dp' is not bound; call it inside jax.shard_map"
    with expect(jaxring.UnboundAxisError, text) as info:
        jaxring.allreduce(X, "dp")
    assert isinstance(info.value, NameError)
    assert isinstance(info.value, ValueError)
    with expect(jaxring.UnboundAxisError, text):
        jax.jit(lambda x: jaxring.allreduce(x, "dp"))(X)


def test_unbound_axis_beside_a_bound_one(spmd):
    with expect(jaxring.UnboundAxisError, "axis name 'y' is not bound"):
        spmd(lambda x: jaxring.allreduce(x, ("x", "y")), X)


def test_unhashable_axis(spmd):
    with expect(jaxring.UsageError, r"axis name \{\} is not bound"):
        spmd(lambda x: jaxring.allreduce(x, {}), X)


def test_duplicate_axes(grid):
    with expect(jaxring.UsageError, r"axis 'x' is named twice in \('x', 'y', 'x'\)"):
        grid(lambda x: jaxring.allreduce(x, ("x", "y", "x")), np.ones((6, 2)))


def test_positional_axes(spmd):
    with expect(jaxring.UsageError, r"0 is a positional axis.*jnp.sum\(x, 0\)"):
        spmd(lambda x: jaxring.allreduce(x, ("x", 0)), X)


def test_name_appears_in_errors(spmd):
    with expect(jaxring.UsageError, "^jaxring.allreduce 'gradients': unknown op"):
        spmd(lambda x: jaxring.allreduce(x, "x", "median", name="gradients"), X)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([[0, 1], [2]], r"each index 0\.\.3 exactly once, got \[\[0, 1\], \[2\]\]"),
        ([[0, 1], [1, 2, 3]], "exactly once"),
        ([[0, 1, 2, 3, 4]], "exactly once"),
    ],
)
def test_groups_that_are_no_partition(make_spmd, groups, text):
    spmd = make_spmd({"x": 4}, check_vma=False)
    with expect(jaxring.UsageError, text):
        spmd(lambda x: jaxring.allreduce(x, "x", axis_index_groups=groups), X)


def test_groups_under_check_vma(make_spmd):
    spmd = make_spmd({"x": 4}, check_vma=True)
    with expect(jaxring.UsageError, "check_vma=True cannot type; pass check_vma=False"):
        spmd(lambda x: jaxring.allreduce(x, "x", axis_index_groups=[[0, 1], [2, 3]]), X)


def test_groups_over_vmap_and_mesh(make_spmd):
    spmd = make_spmd({"x": 2}, check_vma=False)
    f = jax.vmap(
        lambda x: jaxring.allreduce(x, ("v", "x"), axis_index_groups=[[0, 3], [1, 2]]),
        axis_name="v",
    )
    with expect(jaxring.UsageError, "axis_index_groups over a vmap axis together with other axes"):
        spmd(f, np.ones((2, 2, 3)))


def test_operand_that_varies_over_some_of_the_axes(make_spmd):
    grid = make_spmd({"x": 2, "y": 3}, check_vma=True)

    def f(x):
        return jaxring.allreduce(jaxring.allreduce(x, "x"), ("x", "y"))

    with expect(jaxring.UsageError, r"varies over \['y'\] of the axes \('x', 'y'\) only"):
        grid(f, np.ones((6, 2)))


# -- Ops, dtypes, algorithms -----------------------------------------------------------------------


@pytest.mark.parametrize("op", ["median", None, np.add, "SUM"])
def test_unknown_op(spmd, op):
    with expect(jaxring.UsageError, r"unknown op .*; use sum, mean.* or "):
        spmd(lambda x: jaxring.allreduce(x, "x", op), X)


@pytest.mark.parametrize(
    ("op", "dtype", "use"),
    [
        ("and", "float32", "sum, mean, prod, min or max"),
        ("or", "int32", "sum, mean, prod, min or max"),
        ("min", "complex64", "sum, mean or prod"),
        ("max", "complex64", "sum, mean or prod"),
    ],
)
def test_op_without_meaning_for_the_dtype(spmd, op, dtype, use):
    text = f"op '{op}' has no meaning for {dtype}; use {use}"
    with expect(jaxring.UsageError, text):
        spmd(lambda x: jaxring.allreduce(x, "x", op), X.astype(dtype))
    with expect(jaxring.UsageError, text):  # constants, too
        spmd(lambda x: jaxring.allreduce(np.ones(2, dtype), "x", op), X)


def test_dtype_that_cannot_be_reduced(spmd):
    keys = jax.random.split(jax.random.key(0), 4)
    with expect(jaxring.UsageError, r"key<fry> cannot be reduced; convert to "):
        spmd(lambda k: jaxring.allreduce(k, "x"), keys)


def test_unknown_algorithm(spmd):
    with expect(jaxring.UsageError, "unknown algorithm 'rnig'; use auto, direct, .*ring"):
        spmd(lambda x: jaxring.allreduce(x, "x", algorithm="rnig"), X)
    with expect(jaxring.UsageError, "unknown algorithm 'auto:0-max'"):
        spmd(lambda x: jaxring.allreduce(x, "x", algorithm="auto:0-max"), X)


def test_unknown_algorithm_in_the_setting():
    with expect(jaxring.UsageError, "expected one of auto, direct, ring"):
        jaxring.config.update("algorithm", "nothing:0-64k;ring:64k-max")


def test_transpose_of_a_nonlinear_op(spmd):
    def f(x):
        y = jaxring.allreduce(x, "x", "max")  # has the type that a cotangent needs
        return jax.linear_transpose(lambda x: jaxring.allreduce(x, "x", "max"), x)(y)

    with expect(jaxring.UsageError, "op 'max' is not linear, so it has no transpose"):
        spmd(f, X)


# -- Platforms -------------------------------------------------------------------------------------


def lower_for_tpu():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=auto)
    f = jax.shard_map(
        lambda x: jaxring.allreduce(x, "x", "mean"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    return (
        jax.jit(f)
        .trace(jax.ShapeDtypeStruct((4, 3), np.float32))
        .lower(lowering_platforms=("tpu",))
    )


def test_platform_without_a_backend():
    with expect(jaxring.UsageError, "jaxring has no backend for tpu; it has one for cpu"):
        lower_for_tpu()


def test_platform_without_a_backend_falls_back_on_request():
    with (
        jaxring.config.override(fallback="lax"),
        pytest.warns(UserWarning, match=r"no backend for tpu; jax\.lax serves it instead"),
    ):
        text = lower_for_tpu().as_text()
    assert "stablehlo.all_reduce" in text
    assert "jaxring_collective" not in text


# -- Warnings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "factor"), [("sum", 4), ("mean", 1), ("prod", None)])
def test_invariant_operand_warns_once_and_does_as_lax(make_spmd, op, factor):
    spmd = make_spmd({"x": 4}, check_vma=True)

    def f(x):
        y = jaxring.allreduce(x, "x")
        return y, jaxring.allreduce((y, 2 * y), "x", op)

    with pytest.warns(UserWarning, match=r"(?s)already equal.*reduce_gradients_of") as caught:
        first, again = spmd(f, X)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    np.testing.assert_allclose(again[0], first**4 if factor is None else factor * first)
    spmd(f, X)  # the same line again: silent (warnings are errors here)


@pytest.mark.parametrize("op", ["min", "max"])
def test_invariant_operand_is_harmless_for_ordered_ops(spmd, op):
    def f(x):
        return jaxring.allreduce(jaxring.allreduce(x, "x"), "x", op)

    np.testing.assert_allclose(spmd(f, X), 4 * X)


# -- Settings --------------------------------------------------------------------------------------


def rank_order_algorithms():
    from jaxring._src import native_facts

    return [a["name"] for a in native_facts.lists()["algorithms"] if a["rank_order"]]


def test_deterministic_refuses_other_orders(spmd):
    with jaxring.config.override(deterministic=True):
        text = "algorithm 'ring' does not sum in rank order.*use auto.*direct"
        with expect(jaxring.UsageError, text):
            spmd(lambda x: jaxring.allreduce(x, "x", algorithm="ring"), X)
        spmd(lambda x: jaxring.allreduce(x, "x", algorithm="direct"), X)


def test_deterministic_uses_rank_order(spmd, carried):
    x = np.random.default_rng(0).normal(size=(4, 70_001)).astype(np.float32)

    def f(x):
        return jaxring.allreduce(x, "x")

    with jaxring.config.override(deterministic=True):
        got = spmd(f, x)
    assert set(carried()) <= set(rank_order_algorithms())
    in_order = np.zeros_like(x[0])
    for row in x:
        in_order += row
    np.testing.assert_array_equal(got, np.broadcast_to(in_order, x.shape))


def test_algorithm_setting_by_size_recompiles(make_spmd, carried):
    spmd = make_spmd({"x": 4})
    f = jax.jit(spmd.map(lambda x: jaxring.allreduce(x, "x")))
    large = np.ones((4, 5000), np.float32)
    with jaxring.config.override(algorithm="tree:0-1k;ring:4k-max"):
        f(X).block_until_ready()
        assert set(carried()) == {"tree"}
        f(large).block_until_ready()
        assert set(carried()) == {"ring"}
    with jaxring.config.override(algorithm="reducer"):
        f(X).block_until_ready()
    assert set(carried()) == {"reducer"}
    text = jax.jit(spmd.map(lambda x: jaxring.allreduce(x, "x"))).lower(X).as_text()
    assert 'algorithm = "auto"' in text


def test_chunk_bytes_reaches_the_call(make_spmd):
    f = make_spmd({"x": 2}).map(lambda x: jaxring.allreduce(x, "x"))
    with jaxring.config.override(chunk_bytes=4096, deterministic=True):
        text = jax.jit(f).lower(X[:2]).as_text()
    assert "chunk_bytes = 4096 : i64" in text
    assert "deterministic = true" in text


def test_float0_passes():
    zero = np.zeros((2,), jax.dtypes.float0)

    def f(x):
        y, passed = jaxring.allreduce([x, zero], "v")
        assert passed is zero
        return y

    np.testing.assert_array_equal(jax.vmap(f, axis_name="v")(jnp.ones(3)), np.full(3, 3.0))

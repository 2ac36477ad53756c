"""broadcast and pbroadcast: values, types, derivatives, errors."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxring

X = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)


@pytest.mark.parametrize("root", [0, 1, 3, np.int32(2)])
def test_root(spmd, root):
    got = spmd(lambda x: jaxring.broadcast(x, "x", root), X)
    np.testing.assert_array_equal(got, np.broadcast_to(X[root], X.shape))


@pytest.mark.parametrize("axes", ["x", "y", ("x", "y"), ("y", "x")], ids=str)
def test_axes(grid, axes):
    x = np.arange(6.0, dtype=np.float32)
    got = grid(lambda x: jaxring.broadcast(x, axes, 1), x)
    cube = x.reshape(2, 3)
    expected = {
        "x": cube[1:].repeat(2, 0),
        "y": cube[:, 1:2].repeat(3, 1),
        ("x", "y"): np.full((2, 3), 1),
        ("y", "x"): np.full((2, 3), 3),
    }[axes]
    np.testing.assert_array_equal(got.reshape(2, 3), expected)


def test_pytree_of_any_dtypes_is_one_call_for_each(spmd):
    def f(x):
        tree = {"a": x, "b": x > 0, "c": (x * 2, None), "key": jax.random.key(0)}
        tree["key"] = jax.random.fold_in(tree["key"], lax.axis_index("x"))
        got = jaxring.broadcast(tree, "x", 1)
        return {**got, "key": jax.random.key_data(got["key"])}

    got = spmd(f, X)
    np.testing.assert_array_equal(got["b"], np.broadcast_to(X[1] > 0, X.shape))
    np.testing.assert_array_equal(got["c"][0], np.broadcast_to(2 * X[1], X.shape))
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 1))
    np.testing.assert_array_equal(got["key"], np.broadcast_to(key, (4, 2)))
    text = jax.jit(spmd.map(f)).lower(X).as_text()
    assert text.count("custom_call @jaxring_collective") == 3


def test_only_the_root_counts(spmd):
    x = X.copy()
    x[[0, 2, 3]] = np.nan
    got = spmd(lambda x: jaxring.broadcast(x, "x", 1), x)
    np.testing.assert_array_equal(got, np.broadcast_to(X[1], X.shape))


@pytest.mark.parametrize("size", [1, 70_001, 1_000_003])
@pytest.mark.parametrize("algorithm", ["auto", "tree"])
def test_sizes(make_spmd, size, algorithm):
    x = np.arange(5.0 * size, dtype=np.float32).reshape(5, size)
    with jaxring.config.override(algorithm=algorithm):
        got = make_spmd({"x": 5})(lambda x: jaxring.broadcast(x, "x", 3), x)
    np.testing.assert_array_equal(got, np.broadcast_to(x[3], x.shape))


def test_types(make_spmd):
    def f(x):
        varying = lambda y: set(jax.typeof(y).manual_axis_type.varying)  # noqa: E731
        assert varying(jaxring.broadcast(x, "x")) == {"y"}
        assert varying(jaxring.pbroadcast(x, "x", 0)) == {"x", "y"}
        assert varying(jaxring.broadcast(jaxring.broadcast(x, "x"), ("x", "y"))) == set()
        return x

    make_spmd({"x": 2, "y": 2}, True)(f, X)


@pytest.mark.parametrize("public", [jaxring.broadcast, jaxring.pbroadcast])
def test_gradient(spmd, public):
    """As that of the masked sum."""

    def reference(x):
        masked = lax.psum(jnp.where(lax.axis_index("x") == 2, x, 0), "x")
        return spmd.vary(masked) if public is jaxring.pbroadcast else masked

    def derivatives(f):
        def loss(x):
            return jnp.sum(jnp.sin(f(x * x)) * x)

        return lambda x: (jax.grad(loss)(x), jax.jvp(jax.grad(loss), (x,), (x,))[1])

    ours = spmd(derivatives(lambda x: public(x, "x", 2)), X)
    theirs = spmd(derivatives(reference), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def test_transpose_is_ours(spmd):
    """In the mode where the root needs the others' cotangents, they come by a reduce."""
    f = spmd.map(jax.grad(lambda x: jnp.sum(jaxring.broadcast(x * x, "x"))))
    text = jax.jit(f).lower(X).as_text()
    assert text.count('collective = "reduce"') == (0 if spmd.check_vma else 1)
    f = spmd.map(jax.grad(lambda x: jnp.sum(jaxring.pbroadcast(x * x, "x", 0))))
    text = jax.jit(f).lower(X).as_text()
    assert text.count('collective = "reduce"') == 1
    assert "all_reduce" not in text


@pytest.mark.parametrize(
    ("root", "text"),
    [
        (4, r"root 4 is out of range for 4 ranks; pass one of 0\.\.3"),
        (-1, "root -1 is out of range for 4 ranks"),
        ("0", r"root must be an integer known while tracing, got '0'; pass one of 0\.\.3"),
    ],
)
def test_errors(spmd, root, text):
    with pytest.raises(jaxring.UsageError, match=f"^jaxring.broadcast 'weights': {text}"):
        spmd(lambda x: jaxring.broadcast(x, "x", root, name="weights"), X)


def test_traced_root(spmd):
    with pytest.raises(jaxring.UsageError, match=r"^jaxring.pbroadcast: source must be an integer"):
        spmd(lambda x: jaxring.pbroadcast(x, "x", cast(Any, lax.axis_index("x"))), X)

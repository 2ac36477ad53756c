"""barrier: an identity that waits for everybody."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxring

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def test_identity_of_a_pytree(spmd):
    def f(x):
        tree = {"a": x, "b": (x > 0, None), "c": 3, "key": jax.random.key(1)}
        got = jaxring.barrier("x", tree)
        return {**got, "key": jax.random.key_data(got["key"])}

    got = spmd(f, X)
    np.testing.assert_array_equal(got["a"], X)
    np.testing.assert_array_equal(got["b"][0], X > 0)
    np.testing.assert_array_equal(got["c"], np.full(4, 3))
    assert got["b"][1] is None


def test_one_call_without_copies(spmd):
    f = spmd.map(lambda x: jaxring.barrier("x", (x, x > 0, x[:1])))
    text = jax.jit(f).lower(X).as_text()
    assert text.count("custom_call @jaxring_collective") == 1
    assert text.count("output_operand_alias<") == 3


def test_type_is_kept(make_spmd):
    def f(x):
        y, z = jaxring.barrier("x", (x, jaxring.allreduce(x, "x")))
        assert jax.typeof(y).manual_axis_type.varying == {"x"}
        assert not jax.typeof(z).manual_axis_type.varying
        return y, z

    make_spmd({"x": 4}, True)(f, X)


def test_nobody_leaves_before_all_have_come(make_spmd):
    entered, left = [], []

    def enter(rank):
        time.sleep(0.3 if rank == 2 else 0)
        entered.append(time.monotonic())
        return np.int32(0)

    def leave(rank):
        left.append(time.monotonic())
        return np.int32(0)

    def f(x):
        rank = jaxring.axis_index("x")
        scalar = jax.ShapeDtypeStruct((), np.int32)
        ready = io_callback(enter, scalar, rank)
        ready = jaxring.barrier("x", ready)
        return io_callback(leave, scalar, rank + ready)

    make_spmd({"x": 4}, False)(f, X)
    assert len(entered) == len(left) == 4
    assert min(left) >= max(entered)


def test_derivatives(spmd):
    def f(x):
        return jnp.sum(jaxring.barrier("x", jnp.sin(x)) ** 2)

    np.testing.assert_allclose(spmd(jax.grad(f), X), np.sin(2 * X), rtol=1e-4, atol=1e-6)
    t = spmd(lambda x: jax.jvp(lambda x: jaxring.barrier("x", x), (x,), (2 * x,))[1], X)
    np.testing.assert_array_equal(t, 2 * X)
    back = spmd(lambda x: jax.linear_transpose(lambda x: jaxring.barrier("x", x), x)(3 * x)[0], X)
    np.testing.assert_array_equal(back, 3 * X)


@pytest.mark.parametrize("axes", ["v", ("v", "x"), "x"], ids=str)
def test_vmap(spmd, axes):
    f = jax.vmap(lambda x: jaxring.barrier(axes, x), axis_name="v")
    np.testing.assert_array_equal(spmd(f, X), X)
    text = jax.jit(spmd.map(f)).lower(X).as_text()
    assert text.count("@jaxring_collective") == (axes != "v")


def test_without_x(spmd):
    with jaxring.init() as comm:
        assert jaxring.barrier(comm) is None
        with pytest.raises(jaxring.UsageError, match="blocks, which it cannot while JAX traces"):
            jax.jit(lambda x: (jaxring.barrier(comm), x)[1])(X)
    for x in (None, {}, []):
        with pytest.raises(jaxring.UsageError, match="over an axis it is ordered through x, which"):
            spmd(lambda y, x=x: (jaxring.barrier("x", x), y)[1], X)
